"""Scattered rows of bytes copied by one call, without the interpreter lock. Knows arrays, neither pools nor peers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from kvferry.kernels.cpu.native import kernels

Rows = npt.NDArray[np.uint8]
"""[num_rows, row_bytes] or [num_rows, num_planes, plane_bytes]; the last axis lies without gaps."""


@cache
def can_copy_rows() -> bool:
    """Whether there are compiled kernels. The first call of a process loads them, that of a machine compiles them."""
    try:
        kernels()
    except RuntimeError:
        return False
    return True


def copy_rows(
    source: Rows, source_ids: Sequence[int], target: Rows, target_ids: Sequence[int], *, past_cache: bool
) -> None:
    """Row `source_ids[i]` of `source` to row `target_ids[i]` of `target`. They must not overlap.

    `past_cache`: quicker from some megabytes on, but what reads them next has to fetch them from memory. Raises
    IndexError for an id out of range, ValueError when rows differ in shape, RuntimeError without compiled kernels.
    """
    if not target_ids:
        return
    shape, source_strides, target_strides = target.shape, source.strides, target.strides
    if source.shape[1:] != shape[1:] or len(source_ids) != len(target_ids):
        raise ValueError(f"{len(source_ids)} rows {source.shape[1:]} to {len(target_ids)} rows {shape[1:]}")
    if source_strides[-1] != 1 or target_strides[-1] != 1:
        raise ValueError("a row's bytes have to lie without gaps")
    for rows, ids in ((source, source_ids), (target, target_ids)):
        if min(ids) < 0 or max(ids) >= len(rows):
            raise IndexError(f"rows {min(ids)} to {max(ids)} of {len(rows)}")
    num_planes, plane_bytes = (1, shape[1]) if len(shape) == 2 else shape[1:]
    reads, writes = array("q", source_ids), array("q", target_ids)
    kernels().run(
        "copy_rows",
        1,
        source.ctypes.data,
        source_strides[0],
        source_strides[1],
        target.ctypes.data,
        target_strides[0],
        target_strides[1],
        reads.buffer_info()[0],
        writes.buffer_info()[0],
        len(writes),
        num_planes,
        plane_bytes,
        int(past_cache),
    )
