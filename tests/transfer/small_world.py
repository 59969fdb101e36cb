"""A small instance of the hand-over whose every state can be copied, told apart and checked; see `explore.py`.

Two nodes with their real `BlockPool`, `LeaseTable`, `OwnerSide` and `ReaderSide`; the wire, the clock, the memory and
whatever may go wrong are here, as actions that may be taken in any order. Shared memory is modelled: a reader copies
half blocks whenever it likes, and nothing stops it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.common.errors import KvferryError, LeaseExpired
from kvferry.services.engine.block_pool import Account, BlockPool
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.protocol import OwnerSide, ReaderSide

NUM_BLOCKS = 3
PROMPT_BLOCKS = 2
LEASE_S, TICK_S = 8.0, 4.0
HALVES = 2
Message = tuple[Any, ...]
T = TypeVar("T")
Action = tuple[str, *tuple[Any, ...]]


def label(prompt: int, block: int) -> str:
    """What a filled block holds, and its name."""
    return f"p{prompt}.{block}"


@dataclass
class Budgets:
    """How often each thing may happen in one history."""

    cancel: int = 1
    crash: int = 1
    drop: int = 0
    duplicate: int = 0
    renew: int = 0
    reuse: int = 0
    evict: int = 0
    revoke: int = 0


class Node:
    def __init__(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)
        self.memory = [["?"] * HALVES for _ in range(NUM_BLOCKS)]

    def name(self, block_id: int, text: str) -> int:
        return self.pool.register(block_id, text.encode())


@dataclass
class OwnerRun:
    side: OwnerSide
    block_ids: list[int]
    num_filled: int = 0
    is_open: bool = True  # holds its blocks as a sequence


@dataclass
class Receive:
    side: ReaderSide
    block_ids: list[int]
    source: list[list[str]]  # the owner's memory, mapped: it outlives the owner
    pairs: list[tuple[int, int]] = field(default_factory=list)
    halves: int = 0
    is_computed: bool = False


class World:
    """One state. Actions change it; `fingerprint` tells two states apart.

    `cached`: the owner has the prompts' blocks from before, and gives what is left of them, and computes nothing.
    """

    def __init__(self, num_prompts: int, budgets: Budgets, cached: bool = False) -> None:
        self.now = 0.0
        self.budgets = budgets
        self.outcomes: list[tuple[str, ...]] = [()] * num_prompts
        self.to_owner: list[tuple[Message, ...]] = [()] * num_prompts
        self.to_reader: list[tuple[Message, ...]] = [()] * num_prompts
        self.receives: dict[int, Receive] = {}
        self.reader = Node()
        self.reader_lives = True
        self.boot_owner()
        self.cached = cached
        for p in range(num_prompts if cached else 0):
            block_ids = self.owner.pool.allocate(PROMPT_BLOCKS)
            for i, block_id in enumerate(block_ids):
                self.owner.memory[block_id] = [label(p, i)] * HALVES
                self.owner.name(block_id, label(p, i))
            self.owner.pool.release(block_ids)

    def boot_owner(self) -> None:
        self.owner, self.runs = Node(), dict[int, OwnerRun]()
        self.leases = LeaseTable(
            self.owner.pool.pin,
            self.owner.pool.unpin,
            lease_s=LEASE_S,
            max_pinned_blocks=PROMPT_BLOCKS,
            clock=self.clock,
        )

    def clock(self) -> float:
        return self.now

    # ---- what may happen next

    def actions(self) -> Iterator[Action]:
        for p, outcome in enumerate(self.outcomes):
            yield from self._reader_actions(p, outcome)
            yield from self._owner_actions(p)
            for wire in ("to_owner", "to_reader"):
                if getattr(self, wire)[p]:
                    yield from ((kind, wire, p) for kind in ("drop", "duplicate") if getattr(self.budgets, kind))
        left = [lease.expires_at - self.now for lease in self.leases._leases.values()]
        if max(left, default=0.0) > 0:
            yield ("tick",)
        if min(left, default=1.0) <= 0:
            yield ("sweep",)
        if self.budgets.crash:
            yield from (("crash_owner",), ("crash_reader",))
        if self.budgets.reuse and self.owner.pool.num_available:
            yield ("reuse",)
        if self.budgets.evict and self.owner.pool._cached:
            yield ("evict",)
        if self.budgets.revoke and self.leases.counts().num_cached_pins:
            yield ("revoke",)

    def _reader_actions(self, p: int, outcome: tuple[str, ...]) -> Iterator[Action]:
        if not self.reader_lives or outcome:
            return
        receive = self.receives.get(p)
        if receive is None:
            if self.reader.pool.num_available >= PROMPT_BLOCKS:
                yield ("submit", p)
            return
        if self.to_reader[p]:
            yield ("reader_takes", p)
        if receive.pairs:
            yield ("copy", p)
        if receive.is_computed and not receive.pairs and receive.side.state.value == "pulling":
            yield ("confirm", p)
        if self.budgets.renew:
            yield ("renew", p)
        yield ("give_up", p)
        if self.budgets.cancel:
            yield ("cancel", p)

    def _owner_actions(self, p: int) -> Iterator[Action]:
        if self.to_owner[p]:
            has_room = self.cached or p in self.runs or self.owner.pool.num_available >= PROMPT_BLOCKS
            if self.to_owner[p][0] != ("start",) or has_room:
                yield ("owner_takes", p)
        if p in self.runs and self.runs[p].is_open:
            yield ("fill", p)

    def take(self, action: Action) -> None:
        name, *args = action
        if hasattr(self.budgets, name.removesuffix("_owner").removesuffix("_reader")):
            kind = name.removesuffix("_owner").removesuffix("_reader")
            setattr(self.budgets, kind, getattr(self.budgets, kind) - 1)
        getattr(self, name)(*args)

    # ---- the reader

    def submit(self, p: int) -> None:
        block_ids = self.reader.pool.allocate(PROMPT_BLOCKS, incoming=True)
        self.receives[p] = Receive(ReaderSide(0, block_ids), block_ids, self.owner.memory)
        self._send("to_owner", p, ("start",))

    def reader_takes(self, p: int) -> None:
        receive, message = self.receives[p], self._pop("to_reader", p)
        side = receive.side
        try:
            match message:
                case ("accepted", lease_id, num_blocks):
                    if side.lease_id:
                        raise LeaseExpired("accepted twice")
                    side.accepted(lease_id, num_blocks)
                case ("filled", offer):
                    receive.pairs.extend(zip(offer.block_ids, side.offered(offer), strict=True))
                case ("computed",):
                    side.computed()
                    receive.is_computed = True
                case ("released", valid):
                    if side.state.value == "confirming":
                        side.answered(valid)
                        self._adopt(p)
                case ("error",) | ("broken",):
                    raise LeaseExpired("the owner ended it")
        except KvferryError:
            self.give_up(p)

    def copy(self, p: int) -> None:
        receive = self.receives[p]
        src, dst = receive.pairs[0]
        assert self.reader.pool._blocks[dst].account is Account.INCOMING, f"a write into block {dst} of somebody else"
        self.reader.memory[dst][receive.halves] = receive.source[src][receive.halves]
        receive.halves += 1
        if receive.halves == HALVES:
            receive.pairs.pop(0)
            receive.halves = 0
            receive.side.copied(1)

    def confirm(self, p: int) -> None:
        try:
            self.receives[p].side.confirm()
            self._send("to_owner", p, ("release",))
        except KvferryError:
            self.give_up(p)

    def renew(self, p: int) -> None:
        self._send("to_owner", p, ("renew",))

    def give_up(self, p: int) -> None:
        """A failure or a timeout: the prompt is computed here."""
        receive = self._leave(p)
        self.reader.pool.arrived(receive.block_ids)
        for i, block_id in enumerate(receive.block_ids):
            self.reader.memory[block_id] = [label(p, i)] * HALVES
        self._finish(p, receive)

    def cancel(self, p: int) -> None:
        receive = self._leave(p)
        self.reader.pool.release(receive.block_ids)
        self.outcomes[p] += ("cancelled",)

    def _leave(self, p: int) -> Receive:
        receive = self.receives.pop(p)
        receive.side.end()
        self.to_reader[p] = ()
        self._send("to_owner", p, ("gone",))
        return receive

    def _adopt(self, p: int) -> None:
        """What the owner had; the rest is computed here."""
        receive = self.receives.pop(p)
        self.reader.pool.arrived(receive.block_ids)
        for i in range(receive.side.num_blocks, PROMPT_BLOCKS):
            self.reader.memory[receive.block_ids[i]] = [label(p, i)] * HALVES
        self._finish(p, receive)

    def _finish(self, p: int, receive: Receive) -> None:
        table = [self.reader.name(block_id, label(p, i)) for i, block_id in enumerate(receive.block_ids)]
        self.reader.pool.release(table)
        self.outcomes[p] += ("finished",)

    # ---- the owner

    def owner_takes(self, p: int) -> None:
        message, run = self._pop("to_owner", p), self.runs.get(p)
        if message == ("start",) and run is None and self.cached:
            self._offer_cached(p)
        elif message == ("start",) and run is None:
            block_ids = self.owner.pool.allocate(PROMPT_BLOCKS)
            self.runs[p] = run = OwnerRun(OwnerSide(self.leases, "reader", 0), block_ids)
            self._send("to_reader", p, ("accepted", run.side.lease_id, PROMPT_BLOCKS))
        elif message == ("renew",) and run is not None:
            try:
                run.side.renew()
            except LeaseExpired:
                self._end_run(p, ("error",))
        elif message == ("release",) and run is not None:
            self._send("to_reader", p, ("released", run.side.release()))
            self._end_run(p)
        elif message == ("gone",) and run is not None:
            self._end_run(p)

    def _offer_cached(self, p: int) -> None:
        block_ids = self.owner.pool.lookup([label(p, i).encode() for i in range(PROMPT_BLOCKS)])
        if not block_ids:
            self._send("to_reader", p, ("error",))
            return
        self.runs[p] = run = OwnerRun(OwnerSide(self.leases, "reader", 0, for_cached=True), block_ids, is_open=False)
        offer = run.side.filled(block_ids, complete=True)
        self._send("to_reader", p, ("accepted", run.side.lease_id, len(block_ids)))
        self._send("to_reader", p, ("filled", offer))
        self._send("to_reader", p, ("computed",))

    def fill(self, p: int) -> None:
        run = self.runs[p]
        i = run.num_filled
        self.owner.memory[run.block_ids[i]] = [label(p, i)] * HALVES
        run.block_ids[i] = self.owner.name(run.block_ids[i], label(p, i))
        run.num_filled += 1
        complete = run.num_filled == PROMPT_BLOCKS
        try:
            offer = run.side.filled(run.block_ids[: run.num_filled], complete=complete)
        except LeaseExpired:
            self._end_run(p, ("error",))
            return
        assert offer is not None
        self._send("to_reader", p, ("filled", offer))
        if complete:
            self._close(run)
            self._send("to_reader", p, ("computed",))

    def sweep(self) -> None:
        self._end_runs(self.leases.expire_due())

    def revoke(self) -> None:
        """A request waits for blocks."""
        self._end_runs(self.leases.revoke_cached())

    def _end_runs(self, lease_ids: list[str]) -> None:
        expired = set(lease_ids)
        for p in [p for p, run in self.runs.items() if run.side.lease_id in expired]:
            self._end_run(p, ("error",))

    def _end_run(self, p: int, message: Message | None = None) -> None:
        run = self.runs.pop(p)
        run.side.end()
        self._close(run)
        if message is not None:
            self._send("to_reader", p, message)

    def _close(self, run: OwnerRun) -> None:
        if run.is_open:
            run.is_open = False
            self.owner.pool.release(run.block_ids)

    # ---- the world

    def tick(self) -> None:
        self.now += TICK_S

    def reuse(self) -> None:
        """Somebody else's work takes all that the owner has to give, writes into it, and leaves."""
        self._use(self.owner.pool.num_available)

    def evict(self) -> None:
        """The same with one block more than is free: the least recently used cached one is gone."""
        self._use(self.owner.pool.accounts().free + 1)

    def _use(self, num_blocks: int) -> None:
        block_ids = self.owner.pool.allocate(num_blocks)
        for block_id in block_ids:
            self.owner.memory[block_id] = ["other"] * HALVES
        self.owner.pool.release(block_ids)

    def drop(self, wire: str, p: int) -> None:
        self._pop(wire, p)

    def duplicate(self, wire: str, p: int) -> None:
        getattr(self, wire)[p] = (getattr(self, wire)[p][0], *getattr(self, wire)[p])

    def crash_owner(self) -> None:
        """And it is back at once, behind the same address, with nothing of what it was."""
        self.to_owner = [()] * len(self.to_owner)
        self.to_reader = [(*queue, ("broken",)) if p in self.receives else () for p, queue in enumerate(self.to_reader)]
        self.boot_owner()

    def crash_reader(self) -> None:
        """On a half-open network: the owner hears nothing, and what was sent still arrives."""
        self.reader, self.reader_lives = Node(), False
        for p in range(len(self.outcomes)):
            if not self.outcomes[p]:
                self.outcomes[p] += ("node died",)
        self.receives = {}
        self.to_reader = [()] * len(self.to_reader)

    def _send(self, wire: str, p: int, message: Message) -> None:
        if wire == "to_owner" or p in self.receives:
            getattr(self, wire)[p] += (message,)

    def _pop(self, wire: str, p: int) -> Message:
        first: Message
        first, *rest = getattr(self, wire)[p]
        getattr(self, wire)[p] = tuple(rest)
        return first

    # ---- what must hold

    def check(self) -> None:
        for node in (self.owner, self.reader):
            node.pool.check()
            for block_id, block in enumerate(node.pool._blocks):
                if block.name is not None:
                    want = [block.name.decode()] * HALVES
                    assert node.memory[block_id] == want, f"block {block.name!r} holds {node.memory[block_id]}"
                    prompt, number = block.name.decode().removeprefix("p").split(".")
                    parent = label(int(prompt), max(int(number) - 1, 0)).encode()
                    assert node.pool.holds(parent), f"block {block.name!r} has outlived its parent"
        pins = sum(block.num_pins for block in self.owner.pool._blocks)
        assert pins == self.leases.counts().num_pins, "pins without a lease, or a lease without its pins"
        assert all(len(outcome) <= 1 for outcome in self.outcomes), f"more than one ending: {self.outcomes}"

    @property
    def is_over(self) -> bool:
        """Every request has ended, and nothing is left of them anywhere."""
        idle = all(node.pool.num_available == NUM_BLOCKS for node in (self.owner, self.reader))
        return idle and all(self.outcomes) and not self.leases.num_open and not self.runs
