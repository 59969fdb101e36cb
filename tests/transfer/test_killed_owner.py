"""An owner that is killed in the middle of a transfer, fifty times over: every pull ends, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.common.errors import KvferryError
from kvferry.common.fail_points import FailPoints
from kvferry.services.transfer.base import Transport
from kvferry.services.transfer.conformance.owners import CARD, HAS_UCX, POISON, content
from kvferry.services.transfer.grpc import GrpcTransport
from kvferry.services.transfer.puller import Puller
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.shm import ShmTransport
from kvferry.services.transfer.ucx import UcxTransport

NUM_DEATHS = 50
BOUND_S = 10.0
TIMEOUT_S = 60.0
"""Far above the bound: what ends a pull must be that the owner is gone, not that it was silent for long."""
NUM_BLOCKS, BLOCK_BYTES = 24, 2**20
IDS = list(range(NUM_BLOCKS))


class Farm:
    """Makes owners by fork. Each is a process that holds a lease on all its blocks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @contextlib.contextmanager
    def owner(self, offers: str, faults: str) -> Iterator[dict[str, Any]]:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps((NUM_BLOCKS, BLOCK_BYTES, offers, faults)) + "\n")
        self._process.stdin.flush()
        said: dict[str, Any] = json.loads(self._process.stdout.readline())
        try:
            yield said
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(said["pid"], signal.SIGKILL)
            Path(said["path"]).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    command = [sys.executable, "-m", "tests.transfer.owner"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        yield Farm(process)
        process.kill()


def wait_until_dead(pid: int) -> None:
    """Raises psutil.TimeoutExpired when it lives on: nothing has killed it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(BOUND_S)


class KillsOwner(FailPoints):
    """In the middle of a copy out of shared memory the owner dies."""

    pid = 0

    @property
    def are_on(self) -> bool:
        return True

    def pause(self, point: str) -> bool:
        assert point == "transfer.shm.copy"
        os.kill(self.pid, signal.SIGKILL)
        wait_until_dead(self.pid)
        return False


@contextlib.asynccontextmanager
async def closing(transport: Transport) -> AsyncIterator[Transport]:
    try:
        yield transport
    finally:
        await transport.aclose()


async def _die_fifty_times(
    farm: Farm, own: PoolSegment, transport: Transport, faults: Callable[[int], str], tell: Callable[[int], None]
) -> list[tuple[int, int]]:
    """After each death: open files and threads of this process."""
    left = []
    for death in range(NUM_DEATHS):
        with farm.owner(f"{transport.name},grpc", faults(death)) as said:
            tell(said["pid"])
            puller = Puller(CARD, "reader", own, ("grpc",), timeout_s=TIMEOUT_S)
            peer = await puller.connect(said["address"], said["instance_id"])
            async with asyncio.timeout(BOUND_S):
                await transport.open(peer)
                with pytest.raises(KvferryError) if transport.name != "shm" else contextlib.nullcontext():
                    await transport.pull(peer, said["lease_id"], IDS, IDS)
            wait_until_dead(said["pid"])
            transport.drop(peer.instance_id)
            await puller.aclose()
            del peer, puller
        this = psutil.Process()
        left.append((this.num_fds(), this.num_threads()))
    return left


def _check(left: list[tuple[int, int]]) -> None:
    """Connections come and go and pools of threads grow up to their size; what each death left would add up."""
    for kept in zip(*left, strict=True):
        assert min(kept[-10:]) <= max(kept[:10]) + NUM_DEATHS // 10, f"open files and threads after each death: {left}"


def test_over_grpc(farm: Farm) -> None:
    own = PoolSegment.anonymous(NUM_BLOCKS, BLOCK_BYTES)

    async def body() -> list[tuple[int, int]]:
        async with closing(GrpcTransport(own, timeout_s=TIMEOUT_S)) as transport:
            return await _die_fifty_times(
                farm, own, transport, lambda n: f"transfer.grpc.chunk=kill@{1 + n % NUM_BLOCKS}", lambda _: None
            )

    _check(asyncio.run(body()))


@pytest.mark.skipif(not HAS_UCX, reason="ucxx is not installed: pip install 'kvferry[ucx]'")
def test_over_ucx(farm: Farm) -> None:
    own = PoolSegment.anonymous(NUM_BLOCKS, BLOCK_BYTES)

    async def body() -> list[tuple[int, int]]:
        async with closing(UcxTransport(own, timeout_s=TIMEOUT_S)) as transport:
            left = await _die_fifty_times(
                farm, own, transport, lambda n: f"transfer.ucx.run=kill@{2 + n % (NUM_BLOCKS // 2)}", lambda _: None
            )
            assert isinstance(transport, UcxTransport)
            assert transport._connections == []
            return left

    _check(asyncio.run(body()))


def test_over_shared_memory(farm: Farm) -> None:
    """The copy goes on, for the memory stays mapped; nobody is left to confirm it."""
    own = PoolSegment.anonymous(NUM_BLOCKS, BLOCK_BYTES)
    own.buffer[:] = POISON
    killer = KillsOwner()

    async def body() -> list[tuple[int, int]]:
        async with closing(ShmTransport(own, killer)) as transport:
            return await _die_fifty_times(farm, own, transport, lambda _: "", lambda pid: setattr(killer, "pid", pid))

    _check(asyncio.run(body()))
    assert (own.buffer == content(IDS, BLOCK_BYTES)).all()
