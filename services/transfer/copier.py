"""Copies in worker threads that never outlive the coroutine that waits for them. Knows nothing of peers or leases."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvferry.kernels.cpu.rows import Rows, can_copy_rows, copy_rows

Blocks = Rows
"""A pool's memory or a part of it: [num_blocks, block_bytes], or [num_blocks, num_planes, bytes of some heads]."""

T = TypeVar("T")

_PIECE_BYTES = 32 * 2**20
"""Between pieces of this size a copy gives way, or looks whether it was cancelled."""

_PAST_CACHE_BYTES = 4 * 2**20
"""From here on copies go past the cache: less than that may still be in it when attention reads it."""


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
            if not ended.cancelled():
                ended.exception()  # nobody is left to hear of it: not a warning
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
    """Copies rows of `source` to rows of `dest`, which must not overlap. Ends early on `stop`."""
    pieces = copy_pieces(source, src_block_ids, dest, dst_block_ids)
    while (stop is None or not stop.is_set()) and next(pieces, "end") != "end":
        pass


def copy_pieces(
    source: Blocks, src_block_ids: Sequence[int], dest: Blocks, dst_block_ids: Sequence[int]
) -> Iterator[None]:
    """What `copy_blocks` does, with a stop after every `_PIECE_BYTES` or so: about 2 ms."""
    block_bytes = math.prod(dest.shape[1:])
    piece = max(1, _PIECE_BYTES // block_bytes)
    past_cache = len(dst_block_ids) * block_bytes >= _PAST_CACHE_BYTES
    for start in range(0, len(dst_block_ids), piece):
        if start:
            yield
        src, dst = src_block_ids[start : start + piece], dst_block_ids[start : start + piece]
        if can_copy_rows():
            copy_rows(source, src, dest, dst, past_cache=past_cache)
        else:
            dest[dst] = source[src]
