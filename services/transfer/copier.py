"""Copies in worker threads that never outlive the coroutine that waits for them. Knows nothing of peers or leases."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.uint8]
"""A pool's memory or a part of it: [num_blocks, block_bytes], or [num_blocks, num_planes, bytes of some heads]."""

T = TypeVar("T")

_PIECE_BYTES = 8 * 2**20
"""Between pieces of this size a copy gives way, or looks whether it was cancelled."""


class Copier:
    """A few threads for copies. The event loop stays free, and a cancelled copy has ended before its awaiter has."""

    def __init__(self, name: str, num_threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"kvferry-{name}")

    async def run(self, job: Callable[[threading.Event], T]) -> T:
        """Runs `job(stop)` in a thread. On cancel sets `stop`, waits until the job has ended, then raises."""
        stop = threading.Event()
        future = self._pool.submit(job, stop)
        ended = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            stop.set()
            future.cancel()
            while not ended.done():  # a second cancel must not cut the wait short
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([ended])
            raise

    def close(self) -> None:
        """Jobs under way run to their end; new ones are refused with RuntimeError."""
        self._pool.shutdown(wait=False)


def copy_blocks(
    source: Blocks,
    src_block_ids: Sequence[int],
    dest: Blocks,
    dst_block_ids: Sequence[int],
    stop: threading.Event | None = None,
) -> None:
    """Copies rows of `source` to rows of `dest`, which must not overlap; ids must be in range. Ends early on `stop`."""
    pieces = copy_pieces(source, src_block_ids, dest, dst_block_ids)
    while (stop is None or not stop.is_set()) and next(pieces, "end") != "end":
        pass


def copy_pieces(
    source: Blocks, src_block_ids: Sequence[int], dest: Blocks, dst_block_ids: Sequence[int]
) -> Iterator[None]:
    """What `copy_blocks` does, with a stop after every `_PIECE_BYTES` or so: about 1 ms.

    One numpy call per run of adjacent destination blocks, so that a scattered copy, too, gives up the interpreter
    lock once and not once per block (a busy thread takes up to 5 ms to give it back). Where such a run is adjacent at
    the source, too, it is one copy of one large piece, for which the C library does not read what it overwrites: a
    third faster. Where rows are parts of blocks, numpy has no call for scattered ones without a copy in between: then
    one per run that is adjacent on both sides.
    """
    order = np.argsort(np.asarray(dst_block_ids, dtype=np.intp), kind="stable")
    dst = np.asarray(dst_block_ids, dtype=np.intp)[order]
    src = np.asarray(src_block_ids, dtype=np.intp)[order]
    is_whole = source.flags.c_contiguous and dest.flags.c_contiguous
    piece = max(1, _PIECE_BYTES // (dest.shape[-1] * (1 if dest.ndim == 2 else dest.shape[1])))
    ends = np.diff(dst) != 1 if is_whole else (np.diff(dst) != 1) | (np.diff(src) != 1)
    borders = [0, *(np.flatnonzero(ends) + 1).tolist(), len(dst)]
    num_copied = 0
    for run_start, run_stop in itertools.pairwise(borders):
        for start in range(run_start, run_stop, piece):
            if num_copied >= piece:
                num_copied = 0
                yield
            rows = src[start : min(start + piece, run_stop)]
            num_copied += len(rows)
            out = dest[dst[start] : dst[start] + len(rows)]
            if is_whole and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
                np.copyto(out, source[rows[0] : rows[0] + len(rows)])
            elif is_whole:
                np.take(source, rows, axis=0, out=out, mode="clip")  # any other mode copies through a buffer
            else:
                np.copyto(out, source[rows[0] : rows[0] + len(rows)])
