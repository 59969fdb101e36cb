"""Which nodes there are, and what this gateway has on them.

Nodes come from the index, which may be slow, gone or emptied at any time. Then the last known ones stay, so that
requests go on.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvferry.common.errors import IndexUnavailable
from kvferry.common.nodes import LayoutCard, NodeLoad, NodeRecord, NodeState, Role, num_positions
from kvferry.services.gateway.lookup import Named
from kvferry.services.gateway.misfits import Misfit, find_misfits
from kvferry.services.gateway.plan import InFlight, Plan
from kvferry.services.index.base import Nodes, PrefixIndex

log = logging.getLogger("kvferry.gateway")

POLL_S = 1.0
MIN_REFRESH_S = 0.1
REPORT_AGE_S = 1.0  # a heartbeat
RETURN_GRACE_S = 6.0  # for nodes to announce themselves again, after the index was away or emptied
MAX_NAMINGS = 4
MAX_COMING = 64  # the latest prompts on their way that a new one is compared with


class NodeTable:
    """The nodes that serve our model, fresh to about a second. `refresh` is safe to call from anywhere."""

    def __init__(self, index: PrefixIndex, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.nodes: tuple[NodeRecord, ...] = ()
        self.strangers: tuple[NodeRecord, ...] = ()  # nodes that serve another model
        self.index_ok = False
        self._misfits: list[Misfit] = []
        self._index = index
        self._model = model
        self._clock = clock
        self._lock = asyncio.Lock()
        self._refreshed_at = float("-inf")
        self._grace_until = float("-inf")
        self._memory = b""

    async def refresh(self) -> None:
        """Asks the index now, unless somebody just did. Never raises: the last known nodes stay."""
        async with self._lock:
            if self._clock() - self._refreshed_at < MIN_REFRESH_S:
                return
            try:
                found = await self._index.nodes()
            except IndexUnavailable as exc:
                if self.index_ok:
                    log.warning("index unavailable, going on with the %d nodes last seen: %s", len(self.nodes), exc)
                self.index_ok = False
            else:
                self._take(found)
                self.index_ok = True
            self._refreshed_at = self._clock()

    def _take(self, found: Nodes) -> None:
        """A node that left is gone at once. But an index that was away, or was emptied, may have forgotten some."""
        now, records = self._clock(), found.records
        if not self.index_ok or found.memory != self._memory:
            self._grace_until = now + RETURN_GRACE_S
        self._memory = found.memory
        mine = [record for record in records if record.model == self._model]
        if now < self._grace_until:
            known = {record.node_id for record in mine}
            mine += [record for record in self.nodes if record.node_id not in known]
        self.nodes = tuple(mine)
        self._note_misfits()
        self._note_strangers([record for record in records if record.model != self._model])

    def _note_misfits(self) -> None:
        known, self._misfits = self._misfits, find_misfits(self.nodes)
        for misfit in self._misfits:
            if misfit not in known:
                log.warning("%s: %s", misfit.title, misfit.detail)

    def _note_strangers(self, strangers: Sequence[NodeRecord]) -> None:
        known = {record.instance_id for record in self.strangers}
        for record in strangers:
            if record.instance_id not in known:
                log.warning("node %s serves model %r, not %r: not used", record.node_id, record.model, self._model)
        self.strangers = tuple(strangers)

    @property
    def ready_decode(self) -> list[NodeRecord]:
        return [n for n in self.nodes if n.role is not Role.PREFILL and n.state is NodeState.READY]

    @property
    def max_model_len(self) -> int | None:
        """The longest context that every node can take; None while there is no node."""
        return min((node.max_model_len for node in self.nodes), default=None)

    def cards(self) -> list[LayoutCard]:
        """One card per way of naming blocks."""
        cards = {n.card.naming: n.card for n in self.nodes}
        return list(cards.values())[:MAX_NAMINGS]


class Ledger:
    """What this gateway has on each node, counted from the moment of choice: the next choice sees it.

    Prompt tokens count until the node's own report has them, or the first token is there, whichever is first. A report
    has them once they are in the node's queue, which is after the blocks before them have been pulled.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.in_flight: dict[str, InFlight] = {}
        self._clock = clock
        self._coming: dict[bytes, dict[LedgerEntry, None]] = {}  # prompts without a first token, by their first block
        self._unreported: dict[str, deque[LedgerEntry]] = {}
        self._loads: dict[str, NodeLoad] = {}

    def open(self, plan: Plan, num_choices: int, named: Named | None = None) -> LedgerEntry:
        """`named`: the prompt's blocks, which whoever computes it will hold."""
        uncached, end = plan.chosen.num_uncached, plan.num_tokens
        work = InFlight(num_choices, uncached, num_positions(end - uncached, end))
        computer = plan.computer
        names = (named or {}).get(computer.card.naming, ())
        return self.enter(plan.decode.instance_id, computer.instance_id, work, names, plan.chosen.pull_ms / 1e3)

    def enter(
        self, decode: str, computer: str, work: InFlight, names: Sequence[bytes] = (), pull_s: float = 0.0
    ) -> LedgerEntry:
        """`computer` has the tokens, once it has pulled those before them; `decode` the rest."""
        entry = LedgerEntry(self, decode, computer, work, names, self._clock() + pull_s)
        if names:
            self._coming.setdefault(names[0], {})[entry] = None
        entries = self._unreported.setdefault(computer, deque())
        while entries and entries[0].is_reported:  # no report comes while the index is away
            entries.popleft()
        entries.append(entry)
        return entry

    def note_reports(self, nodes: Iterable[NodeRecord]) -> None:
        """A report that is new to us is taken to be at most `REPORT_AGE_S` old, and to know what was sent before."""
        here = {node.instance_id: node.load for node in nodes}
        for name, load in here.items():
            if load != self._loads.get(name):
                self._reported(name, self._clock() - REPORT_AGE_S)
        for gone in self._unreported.keys() - here.keys():
            del self._unreported[gone]
        self._loads = here

    def _reported(self, instance_id: str, until_s: float) -> None:
        entries = self._unreported.pop(instance_id, deque())
        for entry in entries:
            if entry.queued_at_s <= until_s:
                entry.reported()
        if left := [entry for entry in entries if not entry.is_reported]:
            self._unreported[instance_id] = deque(left)

    def coming(self, named: Iterable[Sequence[bytes]], told: Mapping[str, int] | None = None) -> dict[str, int]:
        """Instance -> leading blocks of these that it computes, or has in its queue: what this gateway has sent, and
        what the index has `told` of all gateways."""
        found = dict(told or {})
        for names in named:
            entries = self._coming.get(names[0], {}) if names else {}
            for entry in itertools.islice(reversed(entries), MAX_COMING):
                found[entry.computer] = max(found.get(entry.computer, 0), _num_shared(entry.names, names))
        return found

    def forget_coming(self, entry: LedgerEntry) -> None:
        if entry.names and (entries := self._coming.get(entry.names[0])) is not None:
            entries.pop(entry, None)
            if not entries:
                del self._coming[entry.names[0]]

    def add(self, instance_id: str, num_requests: int, num_tokens: int, num_positions: int) -> None:
        old = self.in_flight.get(instance_id, InFlight())
        new = InFlight(
            old.num_requests + num_requests,
            old.num_prompt_tokens + num_tokens,
            old.num_positions + num_positions,
        )
        if new == InFlight():
            self.in_flight.pop(instance_id, None)
        else:
            self.in_flight[instance_id] = new


def _num_shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Leading names. Equal ones at one place mean equal ones before it."""
    places = range(min(len(one), len(other)))
    return bisect.bisect(places, False, key=lambda at: one[at] != other[at])


class LedgerEntry:
    """One submission's share. All methods may be called again; later calls do nothing."""

    __slots__ = ("_decode", "_ledger", "_num_requests", "_work", "computer", "is_reported", "names", "queued_at_s")

    def __init__(
        self,
        ledger: Ledger,
        decode: str,
        computer: str,
        work: InFlight,
        names: Sequence[bytes],
        queued_at_s: float,
    ) -> None:
        self.computer = computer
        self.names = names
        self.is_reported = not work.num_prompt_tokens
        self.queued_at_s = queued_at_s
        self._ledger = ledger
        self._decode = decode
        self._work = work
        self._num_requests = work.num_requests
        ledger.add(decode, work.num_requests, 0, 0)
        ledger.add(computer, 0, work.num_prompt_tokens, work.num_positions)

    def reported(self) -> None:
        """The node's own report knows of the prompt."""
        if not self.is_reported:
            self._ledger.add(self.computer, 0, -self._work.num_prompt_tokens, -self._work.num_positions)
            self.is_reported = True

    def prompt_done(self) -> None:
        """The first token is there."""
        self.reported()
        self._ledger.forget_coming(self)

    def close(self) -> None:
        self.prompt_done()
        if self._num_requests:
            self._ledger.add(self._decode, -self._num_requests, 0, 0)
            self._num_requests = 0
