"""Owners of blocks for whoever tests a transport: real gRPC servers on loopback, over pools whose content is known.

Those that get killed or stopped are processes of their own (`__main__.py`).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from kvferry.common.fail_points import FailPoints
from kvferry.common.nodes import LayoutCard
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.aio import Server
from kvferry.services.transfer.base import Peer
from kvferry.services.transfer.copier import Blocks
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.puller import Puller
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.server import BlocksServicer

SHM_DIR = "/dev/shm"
OWNER = (sys.executable, "-m", "kvferry.services.transfer.conformance")
HAS_UCX = find_spec("ucxx") is not None
TIMEOUT_S = 1.0
BOUND_S = TIMEOUT_S + 3.0
"""Within this a pull from a dead or silent owner must have ended."""
POISON = 0xEE
CARD = LayoutCard("fingerprint", "numerics", "float32", 16, 2, 1, 8, "0")


def content(block_ids: Sequence[int], block_bytes: int) -> Blocks:
    """What `fill` writes into these blocks: different in every block and at every place."""
    at = np.arange(block_bytes)
    along = (at * 31 + at // 251).astype(np.uint8)
    ids = np.asarray(block_ids, dtype=np.int64)
    blocks = np.add.outer((ids * 37).astype(np.uint8), along)  # wraps: equal only for ids 256 apart
    blocks[:, ::7] ^= (ids // 256 + 1).astype(np.uint8)[:, None]
    return blocks


def fill(segment: PoolSegment) -> None:
    segment.buffer[:] = content(range(segment.num_blocks), segment.block_bytes)


@dataclass
class Owner:
    instance_id: str
    segment: PoolSegment
    leases: LeaseTable
    address: str = ""
    servicer: BlocksServicer | None = None

    def lease(self, block_ids: Sequence[int]) -> str:
        lease_id = self.leases.open("test").lease_id
        self.leases.extend(lease_id, block_ids)
        return lease_id


@contextlib.asynccontextmanager
async def serve(
    segment: PoolSegment,
    *,
    card: LayoutCard = CARD,
    instance_id: str = "",
    transports: Sequence[str] = ("shm", "grpc"),
    leases: LeaseTable | None = None,
    port: int = 0,
    fail_points: FailPoints | None = None,
) -> AsyncIterator[Owner]:
    """An owner of `segment` on loopback. The segment stays the caller's."""
    owner = Owner(instance_id or secrets.token_hex(8), segment, leases or LeaseTable(_nothing, _nothing, lease_s=60.0))
    owner.servicer = servicer = BlocksServicer(owner.instance_id, fail_points)
    servicer.serve(card, segment, owner.leases, transports)
    server = Server(lambda raw: pb_grpc.add_BlocksServicer_to_server(servicer, raw), ())
    port = await server.start("127.0.0.1", port)
    owner.address = f"127.0.0.1:{port}"
    try:
        yield owner
    finally:
        await server.stop(0)
        servicer.close()


@contextlib.contextmanager
def shared_pool(num_blocks: int, block_bytes: int, instance_id: str = "") -> Iterator[tuple[str, PoolSegment]]:
    """Instance id and its filled pool in shared memory."""
    instance_id = instance_id or secrets.token_hex(8)
    segment = PoolSegment.create(SHM_DIR, instance_id, num_blocks, block_bytes)
    try:
        fill(segment)
        yield instance_id, segment
    finally:
        segment.close()


@dataclass
class OwnerProcess:
    process: subprocess.Popen[str]
    pid: int
    address: str
    instance_id: str
    lease_id: str
    path: str

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextlib.contextmanager
def owner_process(
    num_blocks: int,
    block_bytes: int,
    *,
    slow_s: float = 0.0,
    instance_id: str = "",
    port: int = 0,
    offers: Sequence[str] = ("shm", "grpc"),
    program: Sequence[str] = OWNER,
) -> Iterator[OwnerProcess]:
    """An owner to be killed, with a lease on all its blocks. `slow_s` delays each run that it sends."""
    args = [num_blocks, block_bytes, slow_s, instance_id or secrets.token_hex(8), port, ",".join(offers)]
    with subprocess.Popen([*program, *map(str, args)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        said = json.loads(process.stdout.readline())
        try:
            yield OwnerProcess(process, **said)
        finally:
            process.kill()
            process.wait()
            Path(said["path"]).unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def peer_of(address: str, instance_id: str, own: PoolSegment, card: LayoutCard = CARD) -> AsyncIterator[Peer]:
    puller = Puller(card, "reader", own, ("grpc",), timeout_s=TIMEOUT_S)
    try:
        yield await puller.connect(address, instance_id, some_heads=True)
    finally:
        await puller.aclose()


def expiring_leases(num_checks: int) -> LeaseTable:
    """Leases that end after they were looked at `num_checks` times."""

    class ExpiringLeases(LeaseTable):
        left = num_checks

        def check(self, lease_id: str, block_ids: Iterable[int]) -> None:
            if not self.left:
                self.release(lease_id)
            self.left -= 1
            super().check(lease_id, block_ids)

    return ExpiringLeases(lambda _: None, lambda _: None, lease_s=60.0)


def _nothing(block_ids: Sequence[int]) -> None:
    del block_ids
