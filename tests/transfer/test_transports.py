"""The transports of this package against the suite that any transport must pass, and what is theirs alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.common.errors import BlockCorrupt, LeaseExpired, TransferFailed
from kvferry.common.fail_points import FailPoints
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.transfer import copier, server
from kvferry.services.transfer.base import Transport
from kvferry.services.transfer.conformance.owners import (
    HAS_UCX,
    TIMEOUT_S,
    content,
    expiring_leases,
    peer_of,
    serve,
    shared_pool,
)
from kvferry.services.transfer.conformance.suite import TransportConformance
from kvferry.services.transfer.grpc import GrpcTransport
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.shm import ShmTransport
from kvferry.services.transfer.ucx import UcxTransport


class TestShm(TransportConformance):
    def make(self, segment: PoolSegment) -> Transport:
        return ShmTransport(segment)


class TestGrpc(TransportConformance):
    def make(self, segment: PoolSegment) -> Transport:
        return GrpcTransport(segment, timeout_s=TIMEOUT_S)


@pytest.mark.skipif(not HAS_UCX, reason="ucxx is not installed: pip install 'kvferry[ucx]'")
class TestUcx(TransportConformance):
    offers = ("ucx", "grpc")

    def make(self, segment: PoolSegment) -> Transport:
        return UcxTransport(segment, timeout_s=TIMEOUT_S)


def _pull_all(
    leases: LeaseTable, num_blocks: int, block_bytes: int, fail_points: FailPoints | None = None
) -> PoolSegment:
    """All blocks over grpc, under one lease of all of them; returns the reader's pool."""
    own = PoolSegment.anonymous(num_blocks, block_bytes)
    transport = GrpcTransport(own, timeout_s=TIMEOUT_S)
    ids = list(range(num_blocks))

    async def body() -> None:
        with shared_pool(num_blocks, block_bytes) as (instance_id, segment):
            async with (
                serve(segment, instance_id=instance_id, leases=leases, fail_points=fail_points) as owner,
                peer_of(owner.address, instance_id, own) as peer,
            ):
                try:
                    await transport.pull(peer, owner.lease(ids), ids, ids)
                finally:
                    await transport.aclose()

    asyncio.run(body())
    return own


def _leases() -> LeaseTable:
    return LeaseTable(lambda _: None, lambda _: None, lease_s=60.0)


def test_shm_leaves_the_event_loop_to_others_and_ends_between_pieces_when_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copier, "_PIECE_BYTES", 2 * 64)
    own, ids, num_copied = PoolSegment.anonymous(8, 64), list(range(8)), []

    async def body() -> None:
        with shared_pool(8, 64) as (instance_id, segment):
            async with serve(segment, instance_id=instance_id) as owner, peer_of(owner.address, instance_id, own) as it:
                transport = ShmTransport(own)
                await transport.open(it)
                pull = asyncio.create_task(transport.pull(it, owner.lease(ids), ids, ids))
                while len(num_copied) < 3:
                    await asyncio.sleep(0)
                    num_copied.append(int((own.buffer == content(ids, 64)).all(axis=1).sum()))
                pull.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await pull
                await transport.aclose()

    asyncio.run(body())
    assert num_copied == [2, 4, 6]
    assert int((own.buffer == content(ids, 64)).all(axis=1).sum()) == 6


def test_grpc_names_the_block_whose_bytes_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    read_run = server._read_run

    def corrupt(segment: PoolSegment, block_ids: Sequence[int], *rest: Any) -> pb.BlockData:
        run = read_run(segment, block_ids, *rest)
        if 17 in block_ids:
            data = bytearray(run.data)
            data[block_ids.index(17) * segment.block_bytes + 5] ^= 1
            run.data = bytes(data)
        return run

    monkeypatch.setattr(server, "_read_run", corrupt)
    with pytest.raises(TransferFailed, match=r"block 17 .*checksum"):
        _pull_all(_leases(), 40, 50_000)


@pytest.mark.parametrize(("keep", "complaint"), [(0, "sent 0 bytes"), (1, "block 1 .*checksum")])
def test_grpc_refuses_a_stream_with_too_few_blocks(monkeypatch: pytest.MonkeyPatch, keep: int, complaint: str) -> None:
    """A missing one shows at once when another comes in its place."""
    read_run = server._read_run

    def shorten(segment: PoolSegment, block_ids: Sequence[int], *rest: Any) -> pb.BlockData:
        return read_run(segment, block_ids[:keep], *rest)

    monkeypatch.setattr(server, "_read_run", shorten)
    with pytest.raises(TransferFailed, match=complaint):
        _pull_all(_leases(), 40, 50_000)


@pytest.mark.parametrize("num_checks", [0, 1, 2, 5, 8])
def test_grpc_fails_when_the_lease_ends_at_any_point_of_the_read(num_checks: int) -> None:
    with pytest.raises(LeaseExpired, match="lease"):
        _pull_all(expiring_leases(num_checks), 4, 2**20)


def test_shm_reads_what_its_owner_wrote_last() -> None:
    own = PoolSegment.anonymous(4, 4096)
    transport = ShmTransport(own)

    async def body() -> None:
        with shared_pool(4, 4096) as (instance_id, segment):
            async with (
                serve(segment, instance_id=instance_id) as owner,
                peer_of(owner.address, instance_id, own) as peer,
            ):
                for value in (1, 2, 3):
                    segment.buffer[2] = value
                    await transport.pull(peer, owner.lease([2]), [2], [0])
                    assert (own.buffer[0] == value).all()
        await transport.aclose()

    asyncio.run(body())
    assert not np.any(own.buffer[1:])


def test_of_a_peers_pool_shm_enters_only_what_it_reads() -> None:
    """All of it would be the kernel's work for minutes where a pool is large, while the first prompts are computed."""
    own, num_blocks, block_bytes = PoolSegment.anonymous(4, 2**20), 64, 2**20
    transport = ShmTransport(own)

    async def body() -> None:
        with shared_pool(num_blocks, block_bytes) as (instance_id, segment):
            async with (
                serve(segment, instance_id=instance_id) as owner,
                peer_of(owner.address, instance_id, own) as peer,
            ):
                await transport.open(peer)
                await transport.pull(peer, owner.lease([9]), [9], [0])
                await asyncio.sleep(0.2)  # for what goes on behind it
                assert block_bytes <= _entered_bytes(str(segment.path)) < 3 * block_bytes
        await transport.aclose()

    asyncio.run(body())


def _entered_bytes(path: str) -> int:
    """Of this process's read-only mapping of the file."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.endswith(path) and " r--s " in line)
    return next(int(line.split()[1]) * 1024 for line in lines[start:] if line.startswith("Rss:"))


def _pull_all_with(rules: str) -> PoolSegment:
    """Forty blocks in two messages, from an owner with fail points."""
    return _pull_all(_leases(), 40, 50_000, FailPoints(rules))


def test_bytes_that_change_on_the_way_are_never_written() -> None:
    with pytest.raises(BlockCorrupt, match="checksum"):
        _pull_all_with("transfer.grpc.chunk=corrupt@2")


def test_a_message_that_comes_twice_does_not_pass_for_the_one_that_is_missing() -> None:
    """All its checksums are right, for other blocks."""
    with pytest.raises(BlockCorrupt, match="block 20 "):
        _pull_all_with("transfer.grpc.chunk=duplicate@1,transfer.grpc.chunk=drop@2")


def test_a_delayed_message_arrives() -> None:
    own = _pull_all_with("transfer.grpc.chunk=delay:1:20")
    np.testing.assert_array_equal(own.buffer, content(range(40), 50_000))
