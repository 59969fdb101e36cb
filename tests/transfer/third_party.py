"""A transport that somebody else might write, with a part of its own on the owner's side, and the suite over it.

`test_third_party.py` copies this file to another place and runs it there. A request is one line of JSON to a unix
socket of the owner; the answer is a byte for each block, 1 and the block or 0 for "no such lease", and the end of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvferry.common.errors import LeaseExpired, TransferFailed
from kvferry.services.transfer.base import Peer
from kvferry.services.transfer.conformance import __main__ as owner_program
from kvferry.services.transfer.conformance import owners
from kvferry.services.transfer.conformance.owners import TIMEOUT_S, Owner
from kvferry.services.transfer.conformance.suite import TransportConformance
from kvferry.services.transfer.segment import PoolSegment


def socket_of(instance_id: str) -> str:
    return f"\0kvferry-third-party-{instance_id}"


@contextlib.asynccontextmanager
async def serve(segment: PoolSegment, **how: Any) -> AsyncIterator[Owner]:
    async with owners.serve(segment, **how) as owner:

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked = json.loads(await reader.readline())
            with contextlib.suppress(ConnectionError):
                for block_id in asked["block_ids"]:
                    try:
                        owner.leases.check(asked["lease_id"], [block_id])
                    except LeaseExpired:
                        writer.write(b"\0")
                        break
                    writer.write(b"\1" + segment.buffer[block_id].tobytes())
                    await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(answer, socket_of(owner.instance_id))
        try:
            yield owner
        finally:
            server.close()


class Mine:
    name = "mine"

    def __init__(self, segment: PoolSegment) -> None:
        self._segment = segment

    async def open(self, source: Peer) -> None:
        (await self._connect(source))[1].close()

    async def pull(
        self, source: Peer, lease_id: str, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> None:
        reader, writer = await self._connect(source)
        try:
            writer.write(json.dumps({"lease_id": lease_id, "block_ids": list(src_block_ids)}).encode() + b"\n")
            for block_id in dst_block_ids:
                async with asyncio.timeout(TIMEOUT_S):
                    if await reader.readexactly(1) == b"\0":
                        raise LeaseExpired(f"lease {lease_id} has ended")
                    data = await reader.readexactly(self._segment.block_bytes)
                self._segment.buffer[block_id] = bytearray(data)
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as exc:
            raise TransferFailed(f"{source}: {exc or 'it is silent'}") from exc
        finally:
            writer.close()

    async def _connect(self, source: Peer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(socket_of(source.instance_id), limit=2**22)
        except OSError as exc:
            raise TransferFailed(f"{source}: {exc}") from exc

    def drop(self, instance_id: str) -> None:
        """Nothing is kept."""

    async def aclose(self) -> None:
        """Nothing is open."""


class TestMine(TransportConformance):
    offers = ("grpc",)
    program = (sys.executable, __file__)

    def make(self, segment: PoolSegment) -> Mine:
        return Mine(segment)

    def serve(self, segment: PoolSegment, **how: Any) -> Any:
        return serve(segment, transports=self.offers, **how)


if __name__ == "__main__":
    owner_program.main(serve)
