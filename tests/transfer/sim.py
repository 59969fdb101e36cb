"""Prefill and decode nodes as they are, but for the model, the wire and the clock. One event loop runs all.

Whoever writes into a pool is watched: `shadow` is what the authorised writers left there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvferry.common.config import Config, NodeConfig
from kvferry.common.fail_points import FailPoints
from kvferry.common.hashing import block_names, root_name
from kvferry.common.nodes import LayoutCard, Role
from kvferry.common.requests import Holder, PrefillCandidate
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.decode.service import DecodeService
from kvferry.services.decode.session import GatewaySession
from kvferry.services.engine.block_pool import Account, BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.schedule import Schedule
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.node.context import LoadedNode, NodeContext
from kvferry.services.node.metrics import NodeMetrics
from kvferry.services.node.owner import sweep_leases
from kvferry.services.prefill.service import PrefillService
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.puller import Puller
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.server import BlocksServicer
from tests.engine.fake_runner import FakeRunner, extend
from tests.transfer.virtual import HeldJobs, VirtualLoop
from tests.transfer.wire import NODE, Host, Wire

BLOCK = 4
SLOT_BYTES = 8
CARD = LayoutCard("model", "numerics", "float32", BLOCK, 1, 1, 1, "0")
SHM_DIR = "/dev/shm"
COPIES_WAIT = False
"""Whether nodes made from now on copy out of shared memory only when the test says so (`SimNode.copy`)."""
_serial = itertools.count()


class _InThreads(FailPoints):
    """Nothing goes wrong, but copies are made where things could: in threads, which `HeldJobs` stand for."""

    @property
    def are_on(self) -> bool:
        return True

    def pause(self, point: str) -> bool:
        return False


class _Row:
    """The slots of one block, in the pool's memory."""

    def __init__(self, row: Any) -> None:
        self._row = row

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(BLOCK))

    def __getitem__(self, slot: int) -> bytes:
        return bytes(self._row[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES])

    def __setitem__(self, slot: int, digest: bytes) -> None:
        self._row[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = np.frombuffer(digest, dtype=np.uint8)


class _Slots:
    def __init__(self, segment: PoolSegment) -> None:
        self._buffer = segment.buffer

    def __getitem__(self, block: int) -> _Row:
        return _Row(self._buffer[block])

    def __setitem__(self, block: int, digests: list[bytes]) -> None:
        self._buffer[block] = np.frombuffer(b"".join(digests), dtype=np.uint8)


class PoolRunner(FakeRunner):
    """The fake runner over a pool's real memory. `targets`: the blocks that its last step was to write."""

    def __init__(self, segment: PoolSegment, pool: BlockPool) -> None:
        super().__init__(0, BLOCK)
        self.slots: Any = _Slots(segment)
        self.errors: list[Exception] = []
        self.targets: set[int] = set()
        self._pool = pool

    def execute(self, schedule: Schedule) -> Any:
        self.targets = {copy.target for copy in schedule.copies}
        for row in schedule.rows:
            stop = -(-(row.start + row.num_tokens) // BLOCK)
            self.targets |= set(row.sequence.block_table[row.start // BLOCK : stop])
        try:
            for i in self.targets:
                block = self._pool._blocks[i]
                assert block.account is Account.SEQUENCE, f"a step writes into block {i} of {block.account.name}"
                assert not block.num_pins, f"a step writes into block {i}, which a peer has leased"
            return super().execute(schedule)
        except AssertionError as exc:
            self.errors.append(exc)
            raise


def contents(tokens: list[int], salt: str = "") -> dict[bytes, bytes]:
    """Name -> what a block of that name must hold, for all full blocks of `tokens`."""
    names = block_names(root_name(CARD.model_fingerprint, CARD.numerics_id, salt), tokens, BLOCK)
    history, slots = b"", []
    for token in tokens:
        history = extend(history, token)
        slots.append(history)
    return {name: b"".join(slots[i * BLOCK : (i + 1) * BLOCK]) for i, name in enumerate(names)}


class SimNode:
    def __init__(
        self,
        role: Role,
        loop: VirtualLoop,
        wire: Wire,
        num_blocks: int,
        transports: tuple[Any, ...],
        address: str = "",
        max_leased_share: float = 0.5,
    ) -> None:
        self.role, self.loop, self.wire = role, loop, wire
        self.instance = f"{role}{next(_serial)}"
        self.address = address or str(role)
        self.clock_skew_s = 0.0
        self.jobs = HeldJobs()
        self.segment = PoolSegment.create(SHM_DIR, self.instance, num_blocks, BLOCK * SLOT_BYTES)
        self.segment.buffer[:] = 0
        self.shadow = self.segment.buffer.copy()
        self.runner = PoolRunner(self.segment, pool := BlockPool(num_blocks))
        limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=8, max_num_waiting=50)
        self.engine = Engine(self.runner, Scheduler(pool, limits), (), num_blocks * BLOCK, self._report)
        self.leases = LeaseTable(
            self.engine.pin,
            self.engine.unpin,
            lease_s=NodeConfig().lease_s,
            max_pinned_blocks=int(max_leased_share * num_blocks),
            clock=self._clock,
        )
        self.session = GatewaySession()
        self.call(self._build, transports)

    @property
    def pool(self) -> BlockPool:
        return self.engine.pool

    @property
    def candidate(self) -> PrefillCandidate:
        return PrefillCandidate(self.instance, self.address)

    @property
    def num_cached_pulls(self) -> int:
        """Pulls of cached blocks by this node that came to their end."""
        return int(self.sample("cached_pulls_total", outcome="moved"))

    @property
    def num_revoked(self) -> int:
        return int(self.sample("leases_revoked_total"))

    def sample(self, name: str, **labels: str) -> float:
        """What /metrics says; 0 of a series that is not there yet."""
        return self.metrics.registry.get_sample_value(f"kvferry:{name}", labels) or 0.0

    def holder(self, num_blocks: int) -> Holder:
        return Holder(self.instance, self.address, num_blocks)

    def _clock(self) -> float:
        return self.loop.now + self.clock_skew_s

    def _build(self, transports: tuple[Any, ...]) -> None:
        config = Config(node=NodeConfig(local_prefill_max_tokens=BLOCK, cached_pull="always"))
        context = NodeContext(config, self.role, self.address, self.instance, self.address)
        blocks = BlocksServicer(self.instance)
        blocks.serve(CARD, self.segment, self.leases, transports)
        self.metrics = metrics = NodeMetrics(self.engine.load)
        puller = Puller(
            CARD,
            self.instance,
            self.segment,
            transports,
            timeout_s=config.node.peer_timeout_s,
            fail_points=_InThreads() if COPIES_WAIT else None,
            dial=self.wire.channel,
            on_pull=metrics.note_pull,
            on_failure=metrics.note_transport_failure,
        )
        model: Any = SimpleNamespace(vocab_size=512)
        grammars: Any = None
        limit = self.pool.num_blocks * BLOCK
        self._loaded = context.loaded = LoadedNode(
            self.engine, CARD, model, limit, self.leases, puller, metrics, grammars, True
        )
        make = PrefillService if self.role is Role.PREFILL else DecodeService
        self.service: Any = make(context)
        self.host: Any = Host(self.instance)
        self.service.add_to(self.host)
        pb_grpc.add_BlocksServicer_to_server(blocks, self.host)
        self.wire.hosts[self.address] = self.host
        self._puller = puller
        for copier in (blocks._copier, *(t._copier for t in puller.transports_by_name.values())):  # type: ignore[attr-defined]
            copier._pool.shutdown()
            copier._pool = self.jobs

    def _report(self, report: StepReport) -> None:
        def take() -> None:
            self.metrics.note_step(report)
            self.service.on_report(report)

        self.loop.call_soon(take)

    # ---- what a test does to it

    def call(self, work: Callable[..., Any], *args: Any) -> None:
        """In the event loop, as this node."""

        def run() -> None:
            NODE.set(self.instance)
            work(*args)

        self.loop.call_soon(run)
        self.loop.settle()

    def step(self) -> None:
        self.call(self._step)

    def _step(self) -> None:
        self.runner.targets = set()
        self.engine.step()
        self._wrote(self.runner.targets)

    def copy(self) -> None:
        """All copies that have been asked for are made."""
        self.call(self.jobs.run, self._copy)

    def _copy(self, job: Callable[[], Any]) -> Any:
        incoming = {i for i, block in enumerate(self.pool._blocks) if block.account is Account.INCOMING}
        try:
            return job()
        finally:
            self._wrote(incoming)

    def _wrote(self, allowed: set[int]) -> None:
        written = set(np.flatnonzero((self.segment.buffer != self.shadow).any(axis=1)).tolist())
        if not written <= allowed:
            self.runner.errors.append(AssertionError(f"written without leave: {written - allowed}"))
        self.shadow[:] = self.segment.buffer

    def scribble(self) -> None:
        """Somebody else's work takes all blocks that are to be had, writes into them, and leaves."""
        block_ids = self.pool.allocate(self.pool.num_available)
        self.segment.buffer[block_ids] = 0xEE
        self.pool.release(block_ids)
        self.shadow[:] = self.segment.buffer

    def sweep(self) -> None:
        self.call(sweep_leases, self._loaded, self.service.on_lease_expired)

    def die(self, *, half_open: bool) -> None:
        self.wire.crash(self.instance, half_open=half_open)
        self.call(self._end_tasks)
        self.segment.close()

    def _end_tasks(self) -> None:
        for task in self.loop.tasks_of(self.instance):
            task.cancel()
        self.jobs.run(lambda job: None)

    def check(self) -> None:
        self.engine.check()
        assert self.engine.load().accounts.total == self.pool.num_blocks
        pins = sum(block.num_pins for block in self.pool._blocks)
        assert pins == self.leases.counts().num_pins, "pins without a lease, or a lease without its pins"
        assert (self.segment.buffer == self.shadow).all(), f"somebody else wrote into the pool of {self.instance}"
        assert not self.runner.errors, self.runner.errors

    def check_contents(self, want: dict[bytes, bytes], parents: dict[bytes, bytes]) -> None:
        for name, block_id in self.pool._by_name.items():
            assert self.segment.buffer[block_id].tobytes() == want[name], f"{self.instance}: block {block_id}"
            assert name not in parents or self.pool.holds(parents[name]), f"{self.instance}: {block_id} has no parent"
