"""How kernels are started: in one place, so that what is checked ahead of time is what is started.

Within `recording` nothing runs: every launch is written down instead, with its arguments. Needs no GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

Option = int | bool


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Any  # what `triton.jit` made
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]  # by name: the kernel's constexpr parameters
    options: dict[str, Option]  # of the compiler: num_warps, num_stages, enable_fp_fusion


_record: ContextVar[list[Launch] | None] = ContextVar("record", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    launches: list[Launch] = []
    token = _record.set(launches)
    try:
        yield launches
    finally:
        _record.reset(token)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    options: dict[str, Option] | None = None,
    **constants: Any,
) -> None:
    """Runs `kernel` on every point of `grid`; an empty grid is no error."""
    if (record := _record.get()) is not None:
        record.append(Launch(kernel, grid, arguments, constants, options or {}))
    elif 0 not in grid:
        kernel[grid](*arguments, **constants, **(options or {}))


def power_of_two(n: int) -> int:
    """The smallest one that is not less than `n`."""
    return 1 << max(n - 1, 0).bit_length()
