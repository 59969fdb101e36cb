"""Asserts promise 1 for one op: a row keeps its bits in any company, at any index, with 1 and 2 threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

ROW_COUNTS = (1, 2, 3, 4, 5, 6, 8, 11, 13, 33)
"""All numbers of rows that a tile of a dense layer has, and sums of such."""
ODD_WIDTHS = (7, 63, 100, 576, 2000)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_invariant(op: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Returns `op(rows)` after comparing it, bit for bit, with the op on all kinds of slices."""
    with threads(1):
        expected = op(rows)
    for count in (1, 2):
        with threads(count):
            for start in (0, 1, 5):
                for num_rows in (*ROW_COUNTS, len(rows)):
                    part = rows[start : start + num_rows]
                    got = op(part.clone())
                    where = f"{num_rows} rows from {start} with {count} threads"
                    assert torch.equal(got, expected[start : start + num_rows]), where
    return expected
