"""Which nodes there are, what they hold, and what this gateway has on them: everything the router is told.

All of it comes from the index, which may be slow, gone or emptied at any time. Then the last known nodes stay, and
prompts are matched against nothing, so that requests go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvferry.common.errors import IndexUnavailable
from kvferry.common.hashing import block_names, root_name
from kvferry.common.nodes import LayoutCard, NodeLoad, NodeRecord, NodeState, Role
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.plan import InFlight, Plan
from kvferry.services.index.base import PrefixIndex

log = logging.getLogger("kvferry.gateway")

POLL_S = 1.0
MIN_REFRESH_S = 0.1
INDEX_PAUSE_S = 1.0  # no lookups for so long after one failed
REPORT_AGE_S = 1.0  # a heartbeat
RETURN_GRACE_S = 6.0  # for nodes to announce themselves again, after the index was away or emptied
MAX_NAMINGS = 4
LONG_PROMPT_TOKENS = 4096  # longer ones are hashed off the event loop


class NodeTable:
    """The nodes that serve our model, fresh to about a second. `refresh` is safe to call from anywhere."""

    def __init__(self, index: PrefixIndex, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.nodes: tuple[NodeRecord, ...] = ()
        self.strangers: tuple[NodeRecord, ...] = ()  # nodes that serve another model
        self.index_ok = False
        self._index = index
        self._model = model
        self._clock = clock
        self._lock = asyncio.Lock()
        self._refreshed_at = float("-inf")
        self._grace_until = float("-inf")
        self._had_records = False

    async def refresh(self) -> None:
        """Asks the index now, unless somebody just did. Never raises: the last known nodes stay."""
        async with self._lock:
            if self._clock() - self._refreshed_at < MIN_REFRESH_S:
                return
            try:
                records = await self._index.nodes()
            except IndexUnavailable as exc:
                if self.index_ok:
                    log.warning("index unavailable, going on with the %d nodes last seen: %s", len(self.nodes), exc)
                self.index_ok = False
            else:
                self._take(records)
                self.index_ok = True
            self._refreshed_at = self._clock()

    def _take(self, records: Sequence[NodeRecord]) -> None:
        """A node that left is gone at once. But an index that was away, or knows nobody, has forgotten them."""
        now = self._clock()
        if not self.index_ok or (self._had_records and not records):
            self._grace_until = now + RETURN_GRACE_S
        self._had_records = bool(records)
        mine = [record for record in records if record.model == self._model]
        if now < self._grace_until:
            known = {record.node_id for record in mine}
            mine += [record for record in self.nodes if record.node_id not in known]
        self.nodes = tuple(mine)
        self._note_strangers([record for record in records if record.model != self._model])

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
        cards = {(n.card.model_fingerprint, n.card.numerics_id, n.card.block_size): n.card for n in self.nodes}
        return list(cards.values())[:MAX_NAMINGS]


class PrefixLookup:
    """Prompt -> who holds how much of it, within a deadline. A failing index is left alone for a moment."""

    def __init__(
        self,
        index: PrefixIndex,
        timeout_s: float,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._clock = clock
        self._paused_until = float("-inf")
        self._is_failing = False

    async def match(self, token_ids: Sequence[int], cache_salt: str, cards: Sequence[LayoutCard]) -> dict[str, int]:
        """Instance id -> leading blocks. Empty when the index does not answer in time. Never raises."""
        if self._clock() < self._paused_until:
            return {}
        named = [await _names(token_ids, cache_salt, card) for card in cards]
        try:
            async with asyncio.timeout(self._timeout_s):
                found = [await self._index.match(names) for names in named if names]
        except (IndexUnavailable, TimeoutError) as exc:
            self._metrics.index_failures.inc()
            self._paused_until = self._clock() + INDEX_PAUSE_S
            level = logging.DEBUG if self._is_failing else logging.WARNING
            log.log(level, "prefix lookup failed, routing by load alone: %s", str(exc) or "timeout")
            self._is_failing = True
            return {}
        self._is_failing = False
        self._metrics.index_lookups.inc()
        return {name: count for matches in found for name, count in matches.items()}


async def _names(token_ids: Sequence[int], cache_salt: str, card: LayoutCard) -> list[bytes]:
    root = root_name(card.model_fingerprint, card.numerics_id, cache_salt)
    if len(token_ids) > LONG_PROMPT_TOKENS:
        return await asyncio.to_thread(block_names, root, token_ids, card.block_size)
    return block_names(root, token_ids, card.block_size)


class Ledger:
    """What this gateway has on each node, counted from the moment of choice: the next choice sees it.

    Prompt tokens count until the node's own report has them, or the first token is there, whichever is first.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.in_flight: dict[str, InFlight] = {}
        self._clock = clock
        self._unreported: dict[str, deque[LedgerEntry]] = {}
        self._loads: dict[str, NodeLoad] = {}

    def open(self, plan: Plan, num_choices: int) -> LedgerEntry:
        return self.enter(plan.decode.instance_id, plan.chosen.computed_by, num_choices, plan.chosen.num_uncached)

    def enter(self, decode: str, computer: str, num_requests: int, num_tokens: int) -> LedgerEntry:
        entry = LedgerEntry(self, decode, computer, num_requests, num_tokens, self._clock())
        entries = self._unreported.setdefault(computer, deque())
        while entries and not entries[0].num_tokens:  # no report comes while the index is away
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
        entries = self._unreported.get(instance_id, deque())
        while entries and (entries[0].opened_at_s <= until_s or not entries[0].num_tokens):
            entries.popleft().prompt_done()

    def add(self, instance_id: str, num_requests: int, num_tokens: int) -> None:
        old = self.in_flight.get(instance_id, InFlight())
        new = InFlight(old.num_requests + num_requests, old.num_prompt_tokens + num_tokens)
        if new == InFlight():
            self.in_flight.pop(instance_id, None)
        else:
            self.in_flight[instance_id] = new


class LedgerEntry:
    """One submission's share. Both methods may be called again; later calls do nothing."""

    __slots__ = ("_computer", "_decode", "_ledger", "_num_requests", "num_tokens", "opened_at_s")

    def __init__(
        self, ledger: Ledger, decode: str, computer: str, num_requests: int, num_tokens: int, opened_at_s: float
    ) -> None:
        self.num_tokens = num_tokens
        self.opened_at_s = opened_at_s
        self._ledger = ledger
        self._decode = decode
        self._computer = computer
        self._num_requests = num_requests
        ledger.add(decode, num_requests, 0)
        ledger.add(computer, 0, num_tokens)

    def prompt_done(self) -> None:
        """The first token is there, or the node's report knows of it."""
        if self.num_tokens:
            self._ledger.add(self._computer, 0, -self.num_tokens)
            self.num_tokens = 0

    def close(self) -> None:
        self.prompt_done()
        if self._num_requests:
            self._ledger.add(self._decode, -self._num_requests, 0)
            self._num_requests = 0
