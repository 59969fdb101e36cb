"""The puller: which transport it takes and why, what it does when one fails, and whom it refuses to talk to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import socket
import time
import weakref
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvferry.common.errors import BlockCorrupt, ConfigError, LayoutMismatch, LeaseExpired, TransferFailed, Unavailable
from kvferry.common.nodes import LayoutCard
from kvferry.services.transfer.base import Peer, PullResult, Transport
from kvferry.services.transfer.conformance.owners import (
    BOUND_S,
    CARD,
    HAS_UCX,
    TIMEOUT_S,
    Owner,
    content,
    fill,
    owner_process,
    serve,
    shared_pool,
)
from kvferry.services.transfer.puller import Puller
from kvferry.services.transfer.segment import PoolSegment

NUM_BLOCKS, BLOCK_BYTES = 32, 4096


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def private_pool() -> PoolSegment:
    return PoolSegment.anonymous(NUM_BLOCKS, BLOCK_BYTES)


class Heard(Puller):
    """With what it has told: pulls that were done, and (transport, cause) of those that a transport could not do."""

    def __init__(self, card: LayoutCard, own: PoolSegment, transports: Sequence[str], timeout_s: float) -> None:
        self.done: list[PullResult] = []
        self.failures: list[tuple[str, str]] = []

        def failed(transport: str, cause: str) -> None:
            self.failures.append((transport, cause))

        super().__init__(
            card, "reader", own, transports, timeout_s=timeout_s, on_pull=self.done.append, on_failure=failed
        )


@contextlib.asynccontextmanager
async def puller(
    own: PoolSegment | None = None,
    transports: Sequence[str] = ("shm", "grpc"),
    card: LayoutCard = CARD,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[Heard]:
    made = Heard(card, own or private_pool(), transports, timeout_s)
    try:
        yield made
    finally:
        await made.aclose()
        await made.aclose()


@contextlib.asynccontextmanager
async def owner(transports: Sequence[str] = ("shm", "grpc"), card: LayoutCard = CARD) -> AsyncIterator[Owner]:
    with shared_pool(NUM_BLOCKS, BLOCK_BYTES) as (instance_id, segment):
        async with serve(segment, instance_id=instance_id, transports=transports, card=card) as made:
            yield made


class Broken:
    """A transport that opens and then fails."""

    name = "shm"

    def __init__(self, error: Exception, delay_s: float = 0.0) -> None:
        self.error, self.delay_s, self.num_pulls = error, delay_s, 0

    async def open(self, source: Peer) -> None: ...

    async def pull(self, source: Peer, lease_id: str, src: Sequence[int], dst: Sequence[int]) -> None:
        self.num_pulls += 1
        await asyncio.sleep(self.delay_s)
        raise self.error

    def drop(self, instance_id: str) -> None: ...

    async def aclose(self) -> None: ...


def test_the_first_transport_that_both_sides_allow_is_used_and_said_with_its_reason() -> None:
    async def body(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
        async with owner(theirs) as peer_node, puller(transports=mine) as own:
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            result = await own.pull(peer, peer_node.lease([3]), [3], [0])
            (link,) = own.links
            assert (link.instance_id, link.address) == (peer_node.instance_id, peer_node.address)
            assert link.transport == result.transport
            return link.transport, link.reason

    assert asyncio.run(body(("shm", "grpc"), ("grpc", "shm"))) == ("shm", "first choice of both sides")
    assert asyncio.run(body(("grpc", "shm"), ("shm", "grpc"))) == ("grpc", "first choice of both sides")
    assert asyncio.run(body(("shm", "grpc"), ("grpc",))) == ("grpc", "shm: not offered by the peer")
    with pytest.raises(Unavailable, match=r"no transport in common.*offers grpc"):
        asyncio.run(body(("shm",), ("grpc",)))


def test_a_pool_that_is_not_shared_is_pulled_over_grpc() -> None:
    async def body() -> PullResult:
        segment = private_pool()
        fill(segment)
        async with serve(segment) as peer_node, puller() as own:
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            return await own.pull(peer, peer_node.lease([1, 2]), [1, 2], [5, 4])

    result = asyncio.run(body())
    assert (result.transport, result.num_blocks, result.num_bytes) == ("grpc", 2, 2 * BLOCK_BYTES)


def test_shared_memory_is_used_only_where_the_nonce_proves_the_same_host() -> None:
    async def body() -> tuple[str, str]:
        async with owner() as peer_node, puller() as own:
            peer_node.segment.nonce = bytes(16)  # what another host's node would announce under the same path
            await own.connect(peer_node.address, peer_node.instance_id)
            return own.links[0].transport, own.links[0].reason

    transport, reason = asyncio.run(body())
    assert transport == "grpc"
    assert "not the same host" in reason


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TransferFailed("torn"), "transfer_failed"),
        (BlockCorrupt("wrong bytes"), "block_corrupt"),
        (Unavailable("gone"), "unavailable"),
        (OSError(5, "I/O error"), "transfer_failed"),
        (RuntimeError("a bug"), "transfer_failed"),
    ],
)
def test_a_transport_that_fails_at_run_time_is_replaced_without_failing_the_pull(error: Exception, cause: str) -> None:
    own_pool = private_pool()

    async def body() -> None:
        async with owner() as peer_node, puller(own_pool) as own:
            broken = Broken(error)
            own.transports_by_name["shm"] = broken
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            for src in (1, 2):
                result = await own.pull(peer, peer_node.lease([src]), [src], [src])
                assert result.transport == "grpc"
            assert broken.num_pulls == 1
            assert own.failures == [("shm", cause)]
            assert [(one.transport, one.num_blocks, one.num_bytes) for one in own.done] == [
                ("grpc", 1, BLOCK_BYTES)
            ] * 2
            assert all(one.seconds > 0 for one in own.done)
            assert own.links[0].transport == "grpc"
            assert str(error) in own.links[0].reason

    asyncio.run(body())
    np.testing.assert_array_equal(own_pool.buffer[1:3], content([1, 2], BLOCK_BYTES))


@pytest.mark.skipif(not HAS_UCX, reason="ucxx is not installed: pip install 'kvferry[ucx]'")
def test_where_ucx_is_refused_and_no_pool_is_shared_grpc_serves_and_says_why() -> None:
    own_pool = private_pool()

    async def body() -> tuple[PullResult, str]:
        with socket.create_server(("127.0.0.1", 0)) as nobody:  # bound and closed: nobody listens there
            port = nobody.getsockname()[1]
        async with owner(("shm", "ucx", "grpc")) as peer_node, puller(own_pool, ("shm", "ucx", "grpc")) as own:
            assert peer_node.servicer is not None
            assert peer_node.servicer._ucx is not None
            peer_node.servicer._ucx.port = port
            os.unlink(peer_node.segment.path or "")
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            return await own.pull(peer, peer_node.lease([1, 2]), [1, 2], [5, 4]), own.links[0].reason

    result, reason = asyncio.run(body())
    assert result.transport == "grpc"
    np.testing.assert_array_equal(own_pool.buffer[[5, 4]], content([1, 2], BLOCK_BYTES))
    assert re.search(r"shm: cannot open .*No such file.*; ucx: node .* ucx: ", reason)


@pytest.mark.skipif(not HAS_UCX, reason="ucxx is not installed: pip install 'kvferry[ucx]'")
@pytest.mark.parametrize("order", [("shm", "ucx", "grpc"), ("shm", "grpc", "ucx"), ("ucx", "grpc", "shm")])
def test_each_transport_of_any_order_takes_over_from_the_one_before(order: tuple[str, ...]) -> None:
    own_pool = private_pool()

    async def body() -> None:
        async with owner(order) as peer_node, puller(own_pool, order, timeout_s=20.0) as own:
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            for failed, name in enumerate(order):
                own_pool.buffer[:] = 0
                result = await own.pull(peer, peer_node.lease([1, 2]), [1, 2], [5, 4])
                assert result.transport == name
                np.testing.assert_array_equal(own_pool.buffer[[5, 4]], content([1, 2], BLOCK_BYTES))
                assert own.failures == [(gone, "transfer_failed") for gone in order[:failed]]
                own.transports_by_name[name] = Broken(TransferFailed(f"{name} tore"))
            with pytest.raises(TransferFailed, match=f"{order[-1]} tore"):
                await own.pull(peer, peer_node.lease([1]), [1], [1])

    asyncio.run(body())


def test_pulls_that_meet_a_failing_transport_together_all_go_on_with_the_next() -> None:
    own_pool = private_pool()

    async def body() -> None:
        async with owner() as peer_node, puller(own_pool) as own:
            own.transports_by_name["shm"] = Broken(TransferFailed("torn"), delay_s=0.01)
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            async with asyncio.TaskGroup() as group:
                for src in range(8):
                    group.create_task(own.pull(peer, peer_node.lease([src]), [src], [src]))
            assert own.links[0].transport == "grpc"

    asyncio.run(body())
    np.testing.assert_array_equal(own_pool.buffer[:8], content(range(8), BLOCK_BYTES))


def test_when_the_last_transport_fails_the_peer_is_forgotten_and_the_next_pull_shakes_hands_anew() -> None:
    async def body() -> None:
        async with owner() as peer_node, puller(transports=("shm",)) as own:
            whole: Transport = own.transports_by_name["shm"]
            own.transports_by_name["shm"] = Broken(OSError(5, "I/O error"))
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            with pytest.raises(TransferFailed, match="I/O error"):
                await own.pull(peer, peer_node.lease([1]), [1], [1])
            assert own.links == []
            assert own.failures == [("shm", "transfer_failed")]
            assert own.done == []
            own.transports_by_name["shm"] = whole
            await own.pull(peer, peer_node.lease([1]), [1], [1])
            assert len(own.links) == 1

    asyncio.run(body())


def test_an_expired_lease_is_no_fault_of_the_transport() -> None:
    async def body() -> None:
        async with owner(("grpc",)) as peer_node, puller() as own:
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            with pytest.raises(LeaseExpired, match=f"{peer_node.instance_id}.*does not cover block 2"):
                await own.pull(peer, peer_node.lease([1]), [1, 2], [1, 2])
            with pytest.raises(LeaseExpired, match="lease no-such- is unknown"):
                await own.pull(peer, "no-such-lease", [1], [1])
            assert len(own.links) == 1
            assert own.failures == []

    asyncio.run(body())


@pytest.mark.parametrize("field", ["dtype", "block_size", "model_fingerprint", "numerics_id", "num_kv_heads"])
def test_a_peer_of_another_layout_is_refused_with_both_values(field: str) -> None:
    value: Any = {"dtype": "bfloat16", "block_size": 32, "num_kv_heads": 2}.get(field, "another")
    other = replace(CARD, **{field: value})

    async def body() -> None:
        async with owner(card=other) as peer_node, puller() as own:
            with pytest.raises(LayoutMismatch) as caught:
                await own.connect(peer_node.address, peer_node.instance_id)
            message = caught.value.message
            assert field in message
            assert repr(value) in message
            assert repr(getattr(CARD, field)) in message
            assert own.links == []

    asyncio.run(body())


def test_a_reader_refuses_an_owner_that_did_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        async with owner(card=replace(CARD, dtype="bfloat16")) as peer_node, puller() as own:
            check = LayoutCard.check_compatible
            monkeypatch.setattr(
                LayoutCard, "check_compatible", lambda s, o, who: None if "reader" in who else check(s, o, who)
            )
            with pytest.raises(LayoutMismatch, match=r"node .* has kv_cache_dtype 'bfloat16', this node has 'float32'"):
                await own.connect(peer_node.address, peer_node.instance_id)

    asyncio.run(body())


def test_another_instance_at_the_address_is_refused_with_both_names() -> None:
    async def body() -> None:
        async with owner() as peer_node, puller() as own:
            with pytest.raises(Unavailable, match=f"expected before at .*, found {peer_node.instance_id}"):
                await own.connect(peer_node.address, "before")
            assert own.links == []

    asyncio.run(body())


def test_a_restarted_owner_behind_the_same_address_replaces_the_old_one() -> None:
    async def body() -> None:
        async with puller(transports=("grpc",)) as own:
            with owner_process(NUM_BLOCKS, BLOCK_BYTES) as before:
                port = int(before.address.rpartition(":")[2])
                old = await own.connect(before.address, before.instance_id)
                await own.pull(old, before.lease_id, [1], [1])
            assert not alive(before.process.pid)
            with owner_process(NUM_BLOCKS, BLOCK_BYTES, port=port) as after:
                assert after.address == before.address
                async with asyncio.timeout(BOUND_S):
                    with pytest.raises(Unavailable):
                        await own.pull(old, before.lease_id, [1], [1])
                    new = await own.connect(after.address, after.instance_id)
                    await own.pull(new, after.lease_id, [1], [1])
                    assert [link.instance_id for link in own.links] == [after.instance_id]
                    with pytest.raises(Unavailable, match=f"{before.instance_id}.*{after.instance_id}"):
                        await own.connect(before.address, before.instance_id)

    asyncio.run(body())


def test_a_dropped_peer_is_connected_to_again_when_asked_for() -> None:
    async def body() -> None:
        async with owner() as peer_node, puller() as own:
            first = await own.connect(peer_node.address, peer_node.instance_id)
            own.drop(peer_node.instance_id)
            own.drop(peer_node.instance_id)
            assert own.links == []
            second = await own.connect(peer_node.address, peer_node.instance_id)
            assert second.channel is not first.channel
            assert await own.connect(peer_node.address, peer_node.instance_id) is second

    asyncio.run(body())


@pytest.mark.parametrize("listening", [True, False])
def test_a_peer_that_does_not_answer_costs_all_who_wait_one_timeout(listening: bool) -> None:
    async def body() -> float:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            if not listening:
                silent.close()
            async with puller() as own:
                started = time.monotonic()
                results = await asyncio.gather(
                    *(own.connect(address, "gone") for _ in range(20)), return_exceptions=True
                )
                assert all(isinstance(result, Unavailable) and "gone" in str(result) for result in results)
                return time.monotonic() - started

    assert asyncio.run(body()) < BOUND_S


def test_a_waiter_that_leaves_does_not_end_the_handshake_of_the_others() -> None:
    async def body() -> None:
        async with owner() as peer_node, puller() as own:
            first, second = (
                asyncio.create_task(own.connect(peer_node.address, peer_node.instance_id)) for _ in range(2)
            )
            await asyncio.sleep(0)
            first.cancel()
            assert (await second).instance_id == peer_node.instance_id

    asyncio.run(body())


def test_who_waits_for_a_handshake_when_the_puller_closes_gets_an_error_and_is_not_cancelled() -> None:
    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with puller() as own:
                connect = asyncio.create_task(own.connect(f"127.0.0.1:{silent.getsockname()[1]}", "gone"))
                await asyncio.sleep(0.05)
                await own.aclose()
                with pytest.raises(Unavailable, match="closing"):
                    await connect

    asyncio.run(body())


def test_a_dropped_peers_channel_lives_as_long_as_somebody_uses_it() -> None:
    async def body() -> None:
        async with owner() as peer_node, puller(transports=("grpc",)) as own:
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            channel = weakref.ref(peer.channel)
            own.drop(peer_node.instance_id)
            gc.collect()
            transport = own.transports_by_name["grpc"]
            await transport.pull(peer, peer_node.lease([1]), [1], [1])
            del peer
            gc.collect()
            assert channel() is None

    asyncio.run(body())


def test_a_peer_dropped_during_a_pull_does_not_end_the_pull() -> None:

    async def body() -> None:
        with owner_process(64, 2**20, slow_s=0.01) as slow:
            async with puller(PoolSegment.anonymous(64, 2**20), ("grpc",)) as own:
                peer = await own.connect(slow.address, slow.instance_id)
                ids = list(range(64))
                pull = asyncio.create_task(own.pull(peer, slow.lease_id, ids, ids))
                await asyncio.sleep(0.05)
                own.drop(slow.instance_id)
                assert own.links == []
                assert (await pull).num_blocks == 64

    asyncio.run(body())


def test_a_puller_that_is_closed_during_a_pull_fails_the_pull_and_does_not_cancel_its_task() -> None:
    async def body() -> None:
        with owner_process(64, 2**20, slow_s=0.05) as slow:
            async with puller(PoolSegment.anonymous(64, 2**20), ("grpc",)) as own:
                peer = await own.connect(slow.address, slow.instance_id)
                ids = list(range(64))
                pull = asyncio.create_task(own.pull(peer, slow.lease_id, ids, ids))
                await asyncio.sleep(0.2)
                await own.aclose()
                with pytest.raises(TransferFailed):
                    await pull

    asyncio.run(body())


def test_nothing_is_asked_for_an_empty_pull_and_wrong_destinations_are_refused() -> None:
    async def body() -> None:
        async with owner() as peer_node, puller() as own:
            peer = await own.connect(peer_node.address, peer_node.instance_id)
            assert (await own.pull(peer, "none", [], [])).num_blocks == 0
            for src, dst in (([1, 2], [1]), ([1, 2], [3, 3]), ([1], [NUM_BLOCKS]), ([1], [-1])):
                with pytest.raises(ValueError, match="destination block"):
                    await own.pull(peer, "none", src, dst)

    asyncio.run(body())


def test_a_transport_that_is_not_built_in_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'telepathy' is not available"):
        Puller(CARD, "reader", private_pool(), ("telepathy", "grpc"))
