"""Finds out whether an op keeps a row's bits whatever the number of rows, the row's index and the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ROW_COUNTS = (1, 2, 3, 5, 8, 33)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Runs the body with `count` compute threads of this Python thread, then restores what was."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def holds_for_rows(op: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> bool:
    """Whether `op(rows)[i]` has the same bits from any slice of `rows` that holds row i, with 1 and 2 threads."""
    with num_threads(1):
        expected = op(rows)
    for threads in (1, 2):
        with num_threads(threads):
            for start in (0, 1):
                for count in (*ROW_COUNTS, len(rows) - start):
                    part = op(rows[start : start + count].clone())
                    if not torch.equal(part, expected[start : start + count]):
                        return False
    return True
