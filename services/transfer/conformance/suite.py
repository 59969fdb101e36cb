"""What any Transport must do, whoever wrote it: subclass `TransportConformance` as `Test...` and run pytest, which this
module needs and kvferry does not.

    from kvferry.services.transfer.conformance.suite import TransportConformance

    class TestMine(TransportConformance):
        def make(self, segment): return Mine(segment)

Where the owner's side has a part of its own, `serve` and `program` say how an owner is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import numpy as np
import pytest

from kvferry.common.errors import KvferryError, LeaseExpired
from kvferry.common.nodes import LayoutCard
from kvferry.services.transfer.base import Peer, Transport
from kvferry.services.transfer.conformance import owners
from kvferry.services.transfer.conformance.owners import (
    BOUND_S,
    CARD,
    OWNER,
    POISON,
    Owner,
    content,
    owner_process,
    peer_of,
    shared_pool,
)
from kvferry.services.transfer.copier import Blocks
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.segment import PoolSegment


class TransportConformance:
    """`make` returns the transport under test, which writes to `segment` and waits for a peer at most `TIMEOUT_S`."""

    offers: tuple[str, ...] = ("shm", "grpc")
    """What the owners offer, of the transports of this package."""
    program: Sequence[str] = OWNER
    """Command of an owner that is killed or frozen. It gets the arguments and says what `__main__.py` does."""

    def make(self, segment: PoolSegment) -> Transport:
        raise NotImplementedError

    def serve(
        self, segment: PoolSegment, *, instance_id: str, card: LayoutCard = CARD, leases: LeaseTable | None = None
    ) -> AbstractAsyncContextManager[Owner]:
        """An owner of `segment` in this process; `segment` stays the caller's. Its address answers `Blocks`."""
        return owners.serve(segment, instance_id=instance_id, card=card, leases=leases, transports=self.offers)

    @contextlib.asynccontextmanager
    async def transport_to(
        self, address: str, instance_id: str, own: PoolSegment, card: LayoutCard = CARD
    ) -> AsyncIterator[tuple[Transport, Peer]]:
        transport = self.make(own)
        async with peer_of(address, instance_id, own, card) as peer:
            try:
                await transport.open(peer)
                yield transport, peer
            finally:
                await transport.aclose()
                await transport.aclose()

    @pytest.mark.parametrize("pattern", ["adjacent", "permuted", "strided"])
    @pytest.mark.parametrize("num_blocks", [1, 2, 63, 257])
    @pytest.mark.parametrize("block_bytes", [1, 63, 5000, 46080])
    def test_each_block_lands_in_its_row_and_nowhere_else(
        self, block_bytes: int, num_blocks: int, pattern: str
    ) -> None:
        rng = np.random.default_rng(num_blocks)
        src, dst = {
            "adjacent": (np.arange(3, 3 + num_blocks), np.arange(10, 10 + num_blocks)),
            "permuted": (rng.permutation(600)[:num_blocks], rng.permutation(600)[:num_blocks]),
            "strided": (np.arange(0, 2 * num_blocks, 2), np.arange(num_blocks - 1, -1, -1)),
        }[pattern]
        own = PoolSegment.anonymous(600, block_bytes)
        own.buffer[:] = POISON

        async def body() -> None:
            with shared_pool(600, block_bytes) as (instance_id, segment):
                async with (
                    self.serve(segment, instance_id=instance_id) as owner,
                    self.transport_to(owner.address, instance_id, own) as (transport, peer),
                ):
                    await transport.pull(peer, owner.lease(src.tolist()), src.tolist(), dst.tolist())

        asyncio.run(body())
        np.testing.assert_array_equal(own.buffer[dst], content(src.tolist(), block_bytes))
        untouched = np.setdiff1d(np.arange(600), dst)
        assert (own.buffer[untouched] == POISON).all()

    def test_a_block_larger_than_a_message_arrives(self) -> None:
        own = PoolSegment.anonymous(2, 5 * 2**20 + 1)

        async def body() -> None:
            with shared_pool(2, own.block_bytes) as (instance_id, segment):
                async with (
                    self.serve(segment, instance_id=instance_id) as owner,
                    self.transport_to(owner.address, instance_id, own) as (transport, peer),
                ):
                    await transport.pull(peer, owner.lease([0, 1]), [1, 0], [0, 1])

        asyncio.run(body())
        np.testing.assert_array_equal(own.buffer, content([1, 0], own.block_bytes))

    def test_pulls_at_the_same_time_do_not_mix(self) -> None:
        own = PoolSegment.anonymous(64, 46080)

        async def body() -> None:
            with shared_pool(64, 46080) as (instance_id, segment):
                async with (
                    self.serve(segment, instance_id=instance_id) as owner,
                    self.transport_to(owner.address, instance_id, own) as (transport, peer),
                    asyncio.TaskGroup() as group,
                ):
                    for start in range(0, 64, 8):
                        ids = list(range(start, start + 8))
                        group.create_task(transport.pull(peer, owner.lease(ids), ids, ids[::-1]))

        asyncio.run(body())
        expected = [start + 7 - i for start in range(0, 64, 8) for i in range(8)]
        np.testing.assert_array_equal(own.buffer, content(expected, 46080))

    def test_what_is_read_under_an_expired_lease_is_never_confirmed(self) -> None:
        """A transport with messages refuses at once; one without leaves it to the release after the copy."""
        now = [0.0]
        own = PoolSegment.anonymous(8, 64)

        async def body() -> None:
            leases = LeaseTable(lambda _: None, lambda _: None, lease_s=8.0, clock=lambda: now[0])
            with shared_pool(8, 64) as (instance_id, segment):
                async with (
                    self.serve(segment, instance_id=instance_id, leases=leases) as owner,
                    self.transport_to(owner.address, instance_id, own) as (transport, peer),
                ):
                    lease_id = owner.lease([1, 2])
                    now[0] = 8.0
                    with contextlib.suppress(LeaseExpired):
                        await transport.pull(peer, lease_id, [1, 2], [1, 2])
                    assert not leases.release(lease_id)

        asyncio.run(body())

    def test_a_block_beyond_the_owners_pool_is_refused(self) -> None:
        own = PoolSegment.anonymous(8, 64)

        async def body() -> None:
            with shared_pool(8, 64) as (instance_id, segment):
                async with (
                    self.serve(segment, instance_id=instance_id) as owner,
                    self.transport_to(owner.address, instance_id, own) as (transport, peer),
                ):
                    with pytest.raises(KvferryError):
                        await transport.pull(peer, owner.lease([0]), [0, 8], [0, 1])

        asyncio.run(body())

    def test_no_write_comes_after_a_cancelled_pull_has_ended(self) -> None:
        ids = list(range(192))  # several of a copier's pieces
        own = PoolSegment.anonymous(192, 2**20)

        async def body() -> None:
            with shared_pool(192, 2**20) as (instance_id, segment):
                async with (
                    self.serve(segment, instance_id=instance_id) as owner,
                    self.transport_to(owner.address, instance_id, own) as (transport, peer),
                ):
                    num_cancelled = 0
                    # Turns of the event loop first: a copy in it stops after each piece, however fast the machine.
                    for num_turns, delay_s in [(1, 0.0), (2, 0.0), (4, 0.0), (1, 0.003), (1, 0.01), (1, 0.02)]:
                        pull = asyncio.create_task(transport.pull(peer, owner.lease(ids), ids, ids))
                        for _ in range(num_turns):
                            await asyncio.sleep(delay_s)
                        pull.cancel()
                        await asyncio.sleep(0)
                        pull.cancel()  # twice: the wait for the last write must survive it
                        num_cancelled += isinstance(
                            (await asyncio.gather(pull, return_exceptions=True))[0], asyncio.CancelledError
                        )
                        own.buffer[:] = POISON
                        await asyncio.sleep(0.03)
                        assert (own.buffer == POISON).all()
                    assert num_cancelled >= 2

        asyncio.run(body())

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_an_owner_that_dies_or_freezes_during_the_read_costs_a_bounded_time(self, number: int) -> None:
        ids = list(range(64))
        own = PoolSegment.anonymous(64, 2**20)

        async def body() -> float:
            with owner_process(64, 2**20, slow_s=0.05, offers=self.offers, program=self.program) as owner:
                async with self.transport_to(owner.address, owner.instance_id, own) as (transport, peer):
                    pull = asyncio.create_task(transport.pull(peer, owner.lease_id, ids, ids))
                    await asyncio.sleep(0.2)
                    owner.signal(number)
                    started = time.monotonic()
                    async with asyncio.timeout(30):  # raises TimeoutError, which would be a bug
                        with contextlib.suppress(KvferryError):  # a copy out of shared memory may be complete
                            await pull
                    return time.monotonic() - started

        assert asyncio.run(body()) < BOUND_S

    @pytest.mark.parametrize(
        ("num_owners", "num_readers", "num_kv_heads"),
        [(1, 2, 4), (2, 1, 4), (4, 2, 4), (2, 4, 4), (2, 3, 6), (4, 1, 2), (1, 4, 2), (4, 8, 2)],
    )
    def test_a_reader_of_another_tensor_parallel_degree_gets_its_heads_each_in_its_place(
        self, num_owners: int, num_readers: int, num_kv_heads: int
    ) -> None:
        """Ranks are simulated. With more ranks than heads several hold the same head: any of them will do."""
        card = replace(CARD, num_kv_heads=num_kv_heads, num_layers=3)
        owners = [replace(card, tp_rank=rank, tp_size=num_owners) for rank in range(num_owners)]
        readers = [replace(card, tp_rank=rank, tp_size=num_readers) for rank in range(num_readers)]
        shape = (300, 2 * card.num_layers, num_kv_heads, card.block_size * card.head_dim * 4)
        whole = np.random.default_rng(0).integers(0, POISON, shape, dtype=np.uint8)
        src, dst = (np.random.default_rng(seed).permutation(300)[:270] for seed in (1, 2))
        src[100:120] = np.arange(100, 120)  # a stretch that lies together on both sides, too
        dst[100:120] = np.setdiff1d(np.arange(300), dst[np.r_[0:100, 120:270]])[:20]

        async def body() -> None:
            async with contextlib.AsyncExitStack() as stack:
                started = [await self._start_rank(stack, owner, whole) for owner in owners]
                for reader in readers:
                    own = PoolSegment.anonymous(300, reader.block_bytes)
                    own.buffer[:] = POISON
                    expected = np.full((300, shape[1], len(reader.kv_heads), shape[3]), POISON, np.uint8)
                    for owner_card, owner in zip(owners, started, strict=True):
                        if heads := reader.shared_heads(owner_card):
                            async with self.transport_to(owner.address, owner.instance_id, own, reader) as (t, peer):
                                await t.pull(peer, owner.lease(src.tolist()), src.tolist(), dst.tolist())
                            first = reader.kv_heads.start
                            places = slice(heads.start - first, heads.stop - first)
                            expected[dst, :, places] = whole[src][:, :, heads.start : heads.stop]
                            np.testing.assert_array_equal(own.buffer, expected.reshape(300, -1))
                    assert (expected[dst] != POISON).all(), "the simulated owners together lack a head"

        asyncio.run(body())

    async def _start_rank(self, stack: contextlib.AsyncExitStack, card: LayoutCard, whole: Blocks) -> Owner:
        """An owner with this rank's heads of `whole`, [num_blocks, num_planes, num_kv_heads, head_bytes]."""
        instance_id, segment = stack.enter_context(shared_pool(len(whole), card.block_bytes))
        segment.buffer[:] = whole[:, :, card.kv_heads.start : card.kv_heads.stop].reshape(len(whole), -1)
        return await stack.enter_async_context(self.serve(segment, card=card, instance_id=instance_id))

    def test_a_dropped_peer_can_be_pulled_from_again(self) -> None:
        own = PoolSegment.anonymous(4, 64)

        async def body() -> None:
            with shared_pool(4, 64) as (instance_id, segment):
                async with (
                    self.serve(segment, instance_id=instance_id) as owner,
                    self.transport_to(owner.address, instance_id, own) as (transport, peer),
                ):
                    transport.drop(instance_id)
                    transport.drop(instance_id)
                    await transport.pull(peer, owner.lease([3]), [3], [0])

        asyncio.run(body())
        np.testing.assert_array_equal(own.buffer[:1], content([3], 64))
