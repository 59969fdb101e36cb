"""What transport `ucx` does beyond the suite for all transports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from kvferry.common.errors import BlockCorrupt, ConfigError, LeaseExpired, TransferFailed
from kvferry.common.fail_points import FailPoints
from kvferry.services.transfer import ucx_owner, ucx_wire
from kvferry.services.transfer.base import Peer
from kvferry.services.transfer.conformance.owners import (
    CARD,
    POISON,
    TIMEOUT_S,
    Owner,
    content,
    expiring_leases,
    fill,
    peer_of,
    serve,
)
from kvferry.services.transfer.copier import Blocks
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.puller import Puller
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.server import BlocksServicer
from kvferry.services.transfer.ucx import UcxTransport
from kvferry.services.transfer.ucx_owner import UcxOwner
from kvferry.services.transfer.ucx_thread import SETTINGS, UcxThread
from kvferry.services.transfer.ucx_wire import ReadRequest

needs_ucxx = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed: pip install 'kvferry[ucx]'")

ROOT = Path(__file__).parents[2]
NUM_BLOCKS, BLOCK_BYTES = 128, 100_000
IDS = list(range(NUM_BLOCKS))
"""Thirteen runs: more than the window."""


@contextlib.asynccontextmanager
async def pair(
    leases: LeaseTable | None = None, *, fail_points: FailPoints | None = None, timeout_s: float = 10.0
) -> AsyncIterator[tuple[Owner, Peer, UcxTransport, PoolSegment]]:
    segment, own = (PoolSegment.anonymous(NUM_BLOCKS, BLOCK_BYTES) for _ in range(2))
    fill(segment)
    own.buffer[:] = POISON
    transport = UcxTransport(own, timeout_s=timeout_s)
    async with (
        serve(segment, transports=("ucx", "grpc"), leases=leases, fail_points=fail_points) as owner,
        peer_of(owner.address, owner.instance_id, own) as peer,
    ):
        try:
            yield owner, peer, transport, own
        finally:
            await transport.aclose()


def close_ucx(owner: Owner) -> None:
    assert owner.servicer is not None
    assert owner.servicer._ucx is not None
    owner.servicer._ucx.close()


def same_connection_serves(transport: UcxTransport) -> bool:
    return len(transport._connections) == 1 and not transport._connections[0].is_dropped


SETTINGS_IN_USE = """
import json, os, sys
from benchmarks.perftest import environments
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.ucx import UcxTransport
from kvferry.services.transfer.ucx_thread import UcxThread
before = dict(os.environ)
side = UcxTransport(PoolSegment.anonymous(1, 1), timeout_s=1.0)
thread = UcxThread("test", side)
assert dict(os.environ) == before, "whatever is started from here on would run with it, too"
assert environments()["UCX's"] == before
print(json.dumps({name: thread._context.config[name] for name in sys.argv[1:]}))
thread.close()
"""


def settings_in_use(*names: str, **env: str) -> dict[str, str]:
    """What UCX was started with, in a process that has imported nothing yet."""
    command = [sys.executable, "-c", SETTINGS_IN_USE, *names]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    path = os.pathsep.join(map(str, (ROOT, ROOT / "src")))
    done = subprocess.run(
        command, env={**inherited, "PYTHONPATH": path, **env}, stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


@needs_ucxx
def test_ucx_starts_with_its_own_defaults_and_not_with_those_of_its_python_package() -> None:
    in_use = settings_in_use("MAX_RNDV_RAILS", "RNDV_FRAG_MEM_TYPES", "RNDV_SCHEME")
    expected = {"MAX_RNDV_RAILS": "2", "RNDV_FRAG_MEM_TYPES": "host,cuda"}
    assert in_use == expected | {"RNDV_SCHEME": SETTINGS["RNDV_SCHEME"]}


@needs_ucxx
def test_what_the_user_sets_for_ucx_wins() -> None:
    env = {"UCX_MAX_RNDV_RAILS": "1", "UCX_RNDV_SCHEME": "am"}
    in_use = settings_in_use("MAX_RNDV_RAILS", "RNDV_SCHEME", **env)
    assert {f"UCX_{name}": value for name, value in in_use.items()} == env


@needs_ucxx
def test_a_block_whose_bytes_are_wrong_is_named_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(pool: Blocks, block_ids: Sequence[int], tag: int, buffer: Blocks) -> Blocks:
        memory = ucx_wire.write_run(pool, block_ids, tag, buffer)
        if 37 in block_ids:
            memory[8 + block_ids.index(37) * BLOCK_BYTES + 5] ^= 1
        return memory

    async def body() -> None:
        async with pair() as (owner, peer, transport, own):
            with monkeypatch.context() as patch:
                patch.setattr(ucx_owner, "write_run", spoilt)
                with pytest.raises(BlockCorrupt, match=r"block 37 .*checksum"):
                    await transport.pull(peer, owner.lease(IDS), IDS, IDS)
            assert (own.buffer[37] == POISON).all()
            await transport.pull(peer, owner.lease(IDS), IDS, IDS)
            np.testing.assert_array_equal(own.buffer, content(IDS, BLOCK_BYTES))

    asyncio.run(body())


@needs_ucxx
@pytest.mark.parametrize("keep", [0, 1, 9])
def test_a_run_with_too_few_blocks_is_refused(monkeypatch: pytest.MonkeyPatch, keep: int) -> None:
    def short(pool: Blocks, block_ids: Sequence[int], tag: int, buffer: Blocks) -> Blocks:
        return ucx_wire.write_run(pool, block_ids[:keep], tag, buffer)

    async def body() -> None:
        async with pair() as (owner, peer, transport, _):
            monkeypatch.setattr(ucx_owner, "write_run", short)
            with pytest.raises(TransferFailed, match=f"{keep} of 10 blocks"):
                await transport.pull(peer, owner.lease(IDS), IDS, IDS)

    asyncio.run(body())


@needs_ucxx
def test_a_message_that_was_cut_short_never_passes_for_an_older_one_in_the_same_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def head_only(pool: Blocks, block_ids: Sequence[int], tag: int, buffer: Blocks) -> Blocks:
        return ucx_wire.write_run(pool, block_ids, tag, buffer)[:8]

    async def body() -> None:
        async with pair() as (owner, peer, transport, _):
            await transport.pull(peer, owner.lease([5]), [5], [5])
            owner.segment.buffer[5] ^= 0xFF
            monkeypatch.setattr(ucx_owner, "write_run", head_only)
            for _ in range(8):  # whichever buffer is taken
                with pytest.raises(TransferFailed):
                    await transport.pull(peer, owner.lease([5]), [5], [5])

    asyncio.run(body())


@needs_ucxx
@pytest.mark.parametrize("num_checks", [0, 1, 2, 9, 26])
def test_a_lease_that_ends_at_any_point_fails_that_pull_and_not_the_connection(num_checks: int) -> None:
    async def body() -> None:
        leases = expiring_leases(num_checks)
        async with pair(leases) as (owner, peer, transport, own):
            with pytest.raises(LeaseExpired, match="lease"):
                await transport.pull(peer, owner.lease(IDS), IDS, IDS)
            await transport.pull(peer, owner.lease(IDS), IDS, IDS)
            np.testing.assert_array_equal(own.buffer, content(IDS, BLOCK_BYTES))
            assert same_connection_serves(transport)

    asyncio.run(body())


@needs_ucxx
def test_a_cancelled_pull_leaves_the_connection_to_the_others() -> None:
    async def body() -> None:
        async with pair() as (owner, peer, transport, own):
            await transport.open(peer)
            for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004):
                pull = asyncio.create_task(transport.pull(peer, owner.lease(IDS), IDS, IDS))
                other = asyncio.create_task(transport.pull(peer, owner.lease(IDS), [3], [3]))
                await asyncio.sleep(delay_s)
                pull.cancel()
                await asyncio.gather(pull, return_exceptions=True)
                await other
            await asyncio.sleep(0.2)
            assert same_connection_serves(transport)
            assert not transport.is_open, "a receive of a cancelled pull was never answered"
            np.testing.assert_array_equal(own.buffer[3], content([3], BLOCK_BYTES)[0])

    asyncio.run(body())


@needs_ucxx
@pytest.mark.parametrize(
    ("action", "number", "error"),
    [
        *(("corrupt", number, BlockCorrupt) for number in (1, 3, 13)),
        *(("drop", number, TransferFailed) for number in (1, 3, 13)),
        *(("delay", number, None) for number in (1, 3, 13)),
        ("duplicate", 1, TransferFailed),  # nobody receives the second one: it stays in the owner's window
        ("duplicate", 13, None),
    ],
)
def test_a_fault_on_the_way_of_any_run_writes_no_wrong_byte_and_the_next_pull_works(
    action: str, number: int, error: type[Exception] | None
) -> None:
    async def body() -> None:
        fail_points = FailPoints(f"transfer.ucx.run={action}@{number + 1}:20")  # the first run is that of `open`
        async with pair(fail_points=fail_points, timeout_s=2.0) as (owner, peer, transport, own):
            await transport.open(peer)
            with pytest.raises(error) if error else contextlib.nullcontext():
                await transport.pull(peer, owner.lease(IDS), IDS, IDS)
            assert fail_points.hits["transfer.ucx.run", action] == 1
            right = (own.buffer == content(IDS, BLOCK_BYTES)).all(axis=1)
            untouched = (own.buffer == POISON).all(axis=1)
            assert (right | untouched).all()
            assert right.all() == (error is None)
            own.buffer[:] = POISON
            await transport.pull(peer, owner.lease(IDS), IDS, IDS)
            np.testing.assert_array_equal(own.buffer, content(IDS, BLOCK_BYTES))

    asyncio.run(body())


@needs_ucxx
def test_an_owner_that_closes_is_noticed_at_once_and_not_by_its_silence() -> None:
    async def body() -> None:
        fail_points = FailPoints("transfer.ucx.run=drop:1")  # so that the pull is under way when that happens
        async with pair(fail_points=fail_points, timeout_s=300.0) as (owner, peer, transport, _):
            pull = asyncio.create_task(transport.pull(peer, owner.lease(IDS), IDS, IDS))
            assert await asyncio.to_thread(eventually, lambda: bool(fail_points.hits), 10.0)
            await asyncio.to_thread(close_ucx, owner)
            async with asyncio.timeout(30.0):
                with pytest.raises(TransferFailed, match="the connection broke"):
                    await pull

    asyncio.run(body())


@needs_ucxx
def test_another_instance_behind_the_same_port_is_refused() -> None:
    async def body() -> None:
        async with pair() as (owner, peer, transport, _):
            with pytest.raises(TransferFailed, match=f"found {owner.instance_id}: it was restarted"):
                await transport.open(replace(peer, instance_id="before"))

    asyncio.run(body())


@needs_ucxx
def test_nothing_turns_while_nothing_is_pulled() -> None:
    async def body() -> float:
        async with pair() as (owner, peer, transport, _):
            await transport.pull(peer, owner.lease(IDS), IDS, IDS)
            await asyncio.sleep(0.2)
            started = time.process_time()
            await asyncio.sleep(1.0)
            return time.process_time() - started  # of both sides: they share this process

    assert asyncio.run(body()) < 0.05


@needs_ucxx
def test_when_ucx_fails_under_way_the_next_transport_serves_the_same_pull() -> None:
    async def body() -> None:
        segment, own = (PoolSegment.anonymous(NUM_BLOCKS, BLOCK_BYTES) for _ in range(2))
        fill(segment)
        puller = Puller(CARD, "reader", own, ("shm", "ucx", "grpc"), timeout_s=TIMEOUT_S)
        async with serve(segment, transports=("ucx", "grpc")) as owner:
            peer = await puller.connect(owner.address, owner.instance_id)
            assert (await puller.pull(peer, owner.lease(IDS), IDS, IDS)).transport == "ucx"
            close_ucx(owner)
            own.buffer[:] = POISON
            assert (await puller.pull(peer, owner.lease(IDS), IDS, IDS)).transport == "grpc"
            np.testing.assert_array_equal(own.buffer, content(IDS, BLOCK_BYTES))
            await puller.aclose()

    asyncio.run(body())


def test_without_ucxx_whoever_asks_for_it_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ucxx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ucxx", None)
    segment = PoolSegment.anonymous(1, 1)
    with pytest.raises(ConfigError, match=r"kvferry\[ucx\].*--transports"):
        Puller(CARD, "reader", segment, ("ucx", "grpc"))
    servicer = BlocksServicer("owner")
    with pytest.raises(ConfigError, match=r"kvferry\[ucx\].*--transports"):
        servicer.serve(CARD, segment, LeaseTable(lambda _: None, lambda _: None, lease_s=1.0), ("ucx", "grpc"))
    servicer.close()


class SilentReader:
    """Asks, and then receives nothing."""

    is_open = False

    def __init__(self, port: int, request: ReadRequest) -> None:
        self._thread = UcxThread("silent", self)
        self._thread.call(lambda: self._ask(port, request.to_bytes()))

    def _ask(self, port: int, message: bytes) -> None:
        self._endpoint = self._thread.connect("127.0.0.1", port)
        self._sent = self._thread.send_message(self._endpoint, message)

    def tick(self) -> bool:
        return False

    def ended(self, why: str) -> None:
        self._thread.retire(self._endpoint, (self._sent,))

    def close(self) -> None:
        self._thread.close()


def eventually(condition: Callable[[], bool], within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def lone_owner(timeout_s: float) -> Iterator[tuple[UcxOwner, str]]:
    segment = PoolSegment.anonymous(NUM_BLOCKS, BLOCK_BYTES)
    leases = LeaseTable(lambda _: None, lambda _: None, lease_s=60.0)
    lease_id = leases.open("test").lease_id
    leases.extend(lease_id, IDS)
    owner = UcxOwner("owner", CARD, segment, leases, timeout_s=timeout_s)
    try:
        yield owner, lease_id
    finally:
        owner.close()
        owner.close()


@needs_ucxx
def test_a_reader_that_takes_nothing_is_cut_off() -> None:
    with lone_owner(0.5) as (owner, lease_id):
        reader = SilentReader(owner.port, ReadRequest(1 << 24, BLOCK_BYTES, "owner", lease_id, tuple(IDS)))
        assert eventually(lambda: owner.is_open, 3.0)
        assert eventually(lambda: not owner.is_open and not owner._readers, 3.0)
        reader.close()


KILLED_READER = """
import asyncio, sys, time
from kvferry.services.transfer.base import Peer
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.ucx import UcxTransport
peer = Peer("owner", "127.0.0.1:0", 64, ("ucx",), None, int(sys.argv[1]), None)
asyncio.run(UcxTransport(PoolSegment.anonymous(64, 100_000), timeout_s=3.0).open(peer))
print("open", flush=True)
time.sleep(60)
"""


@needs_ucxx
def test_a_killed_reader_is_forgotten() -> None:
    with lone_owner(10.0) as (owner, _):
        command = [sys.executable, "-c", KILLED_READER, str(owner.port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout
            assert reader.stdout.readline() == "open\n"
            assert len(owner._readers) == 1
            reader.kill()
        assert eventually(lambda: not owner._readers, 8.0)
