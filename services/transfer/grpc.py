"""Transport `grpc`: always works. Runs of about 1 MB on a stream, a checksum per block; gRPC does the flow control."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import grpc
import numpy as np
import xxhash

from kvferry.common.errors import BlockCorrupt, TransferFailed
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.errors import from_rpc_error
from kvferry.services.transfer.base import Peer, was_cancelled
from kvferry.services.transfer.copier import Copier
from kvferry.services.transfer.heads import view
from kvferry.services.transfer.segment import PoolSegment


def block_checksum(block: memoryview, block_id: int) -> int:
    """Of a block's bytes and of which block of its owner it is: one sent in another's place is wrong, too."""
    return xxhash.xxh3_64_intdigest(block, seed=block_id)


class GrpcTransport:
    name = "grpc"

    def __init__(self, segment: PoolSegment, *, timeout_s: float) -> None:
        self._own = segment
        self._timeout_s = timeout_s  # longest silence of the owner
        self._copier = Copier("grpc")

    async def open(self, source: Peer) -> None:
        """Nothing to do: the handshake came over the same channel."""

    async def pull(
        self, source: Peer, lease_id: str, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> None:
        num_landed = 0
        async with contextlib.aclosing(self._runs(source, lease_id, src_block_ids)) as runs:
            async for run in runs:
                src, dst = src_block_ids[num_landed:], dst_block_ids[num_landed:]
                num_landed += await self._copier.run(partial(self._land, source, run, src, dst))
        if num_landed != len(dst_block_ids):
            raise TransferFailed(f"{source} sent {num_landed} of {len(dst_block_ids)} blocks")

    async def _runs(self, source: Peer, lease_id: str, block_ids: Sequence[int]) -> AsyncGenerator[pb.BlockData]:
        """The owner's messages, its failures as ours. Ends only when the owner has said that all was well."""
        stub = pb_grpc.BlocksStub(source.channel)
        heads = source.part.heads if source.part else range(0)
        request = pb.ReadRequest(
            lease_id=lease_id, block_ids=block_ids, first_kv_head=heads.start, num_kv_heads=len(heads)
        )
        call = stub.Read(request)
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    message = await call.read()
                if message is grpc.aio.EOF:
                    return
                yield message
        except grpc.RpcError as exc:
            raise from_rpc_error(exc, str(source)) from exc
        except TimeoutError as exc:
            raise TransferFailed(f"{source} sent nothing for {self._timeout_s:g} s") from exc
        except asyncio.CancelledError as exc:
            if was_cancelled():
                raise
            raise TransferFailed(f"{source}: the channel was closed during the read") from exc
        finally:
            call.cancel()

    def _land(
        self, source: Peer, run: pb.BlockData, src: Sequence[int], dst: Sequence[int], stop: threading.Event
    ) -> int:
        """Checks each block of the run and writes it into its row; returns how many there were."""
        part = source.part
        data, size = memoryview(run.data), part.mine.num_bytes if part else self._own.block_bytes
        mine = view(self._own.buffer, part.mine if part else None)
        if not 0 < len(run.checksums) <= len(dst) or len(data) != len(run.checksums) * size:
            raise TransferFailed(f"{source} sent {len(data)} bytes as {len(run.checksums)} blocks of {size}")
        for i, (checksum, src_block_id, dst_block_id) in enumerate(zip(run.checksums, src, dst, strict=False)):
            row = data[i * size : (i + 1) * size]
            if block_checksum(row, src_block_id) != checksum:
                raise BlockCorrupt(f"{source}: block {src_block_id} arrived with a wrong checksum")
            if stop.is_set():
                break
            mine[dst_block_id] = np.frombuffer(row, dtype=np.uint8).reshape(mine.shape[1:])
        return len(run.checksums)

    def drop(self, instance_id: str) -> None:
        """Keeps nothing per peer."""

    async def aclose(self) -> None:
        self._copier.close()
