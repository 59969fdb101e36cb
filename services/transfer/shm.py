"""Transport `shm`: owner and reader share a host, the reader copies straight out of the owner's pool file.

No message is sent, so nothing here can notice that a lease has ended; the reader's release after the copy does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from functools import partial

from kvferry.common.errors import TransferFailed
from kvferry.common.fail_points import FailPoints
from kvferry.kernels.cpu.rows import can_copy_rows
from kvferry.services.transfer.base import Peer
from kvferry.services.transfer.copier import Blocks, Copier, copy_blocks, copy_pieces
from kvferry.services.transfer.heads import view
from kvferry.services.transfer.segment import PoolSegment


class ShmTransport:
    name = "shm"

    def __init__(self, segment: PoolSegment, fail_points: FailPoints | None = None) -> None:
        self._own = segment
        self._fail_points = fail_points or FailPoints()
        self._sources: dict[str, PoolSegment] = {}  # instance id -> its pool, mapped
        self._copier = Copier("shm")
        can_copy_rows()  # compiled now, where that is still to do, and not in the middle of the first pull

    async def open(self, source: Peer) -> None:
        self._attach(source)

    async def pull(
        self, source: Peer, lease_id: str, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> None:
        del lease_id
        part = source.part
        theirs = view(self._attach(source).buffer, part.theirs if part else None)
        mine = view(self._own.buffer, part.mine if part else None)
        if max(src_block_ids) >= len(theirs):
            raise TransferFailed(f"{source} has {len(theirs)} blocks, asked for block {max(src_block_ids)}")
        if self._fail_points.are_on:
            await self._copier.run(partial(self._copy_with_faults, theirs, src_block_ids, mine, dst_block_ids))
            return
        # In the event loop, which each piece delays by 1 ms: a thread's two wake-ups would delay the copy by as much.
        for _ in copy_pieces(theirs, src_block_ids, mine, dst_block_ids):
            await asyncio.sleep(0)

    def drop(self, instance_id: str) -> None:
        self._sources.pop(instance_id, None)  # unmapped when the last copy out of it has ended

    async def aclose(self) -> None:
        self._sources.clear()
        self._copier.close()

    def _copy_with_faults(
        self, theirs: Blocks, src: Sequence[int], mine: Blocks, dst: Sequence[int], stop: threading.Event
    ) -> None:
        half = len(src) // 2
        copy_blocks(theirs, src[:half], mine, dst[:half], stop)
        is_spoilt = self._fail_points.pause("transfer.shm.copy")
        copy_blocks(theirs, src[half:], mine, dst[half:], stop)
        if is_spoilt and not stop.is_set():
            mine[dst[0]].flat[0] ^= 0xFF

    def _attach(self, source: Peer) -> PoolSegment:
        segment = self._sources.get(source.instance_id)
        if segment is None:
            if source.shm is None:
                raise TransferFailed(f"{source} has no shared pool")
            segment = PoolSegment.attach(
                source.shm.path,
                nonce=source.shm.nonce,
                instance_id=source.instance_id,
                num_blocks=source.num_blocks,
                block_bytes=source.part.their_block_bytes if source.part else self._own.block_bytes,
            )
            self._sources[source.instance_id] = segment
        return segment
