"""Which nodes work for a request: a pure function of the request, the nodes and what they have cached.

All terms are milliseconds of predicted work, so that a cached prefix and a queue can be weighed against each other.
A cached prefix saves its computing time once; every request that a node already has costs it again, so a crowd around
a hot prefix spreads by itself. Everything it is told may be stale: a wrong choice costs time, never correctness.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvferry.common.errors import ContextTooLong, Draining, KvferryError, LayoutMismatch, Unavailable
from kvferry.common.nodes import LayoutCard, NodeRecord, NodeState, Role, num_positions
from kvferry.common.requests import Holder, PrefillCandidate
from kvferry.services.gateway.plan import Candidate, Cost, InFlight, Pace, Plan, RouteRequest, Usual

HAND_OVER_MS = 5.0  # of a pull, beside its bytes: a stream, its replies, the confirmation
SHORT_PROMPT_MS = 100.0  # what a decode node computes in a step or so: not worth another node
STREAM_STEPS = 3.0
"""Steps of a decode node that each stream on it weighs as much as, in the choice among decode nodes."""
QUEUE_WEIGHT = 2.0
"""What a millisecond of another node's queue weighs against one that a cached prefix saves here. A queue is worth more
than its time: what joins it delays those to come."""
MAX_PREFILL_CANDIDATES = 4
MAX_HOLDERS = 3
NUM_REASONS = 16


def choose(request: RouteRequest, nodes: Sequence[NodeRecord], matches: Mapping[str, int]) -> Plan:
    """The cheapest pair: each decode node with its cheapest way to compute the prompt, one of the best prefill nodes or
    none. `matches`: instance id -> how many leading blocks of the prompt it holds.

    Nodes whose context is too short for the prompt compute none of it; they may give blocks. Raises Draining or
    Unavailable when no decode node can take the request now, and ContextTooLong when none ever can.
    """
    ready = [n for n in nodes if n.state is NodeState.READY and n.instance_id not in request.excluded]
    decode = [n for n in ready if n.role is not Role.PREFILL and _can_hold(n, request.num_tokens)]
    if not decode:
        raise _nobody(nodes, request.num_tokens)
    estimate = _Estimate(request, ready, matches)
    ranked = sorted((estimate.decode(n) for n in decode), key=estimate.rank)
    chosen = ranked[0]
    node = next(n for n in decode if n.instance_id == chosen.instance_id)
    offered = [estimate.remote(helper, node) for helper in estimate.helpers(node)[:NUM_REASONS]]
    alone = chosen.computed_by == chosen.instance_id and chosen.cost.compute_ms > SHORT_PROMPT_MS
    prefill = [] if alone else offered[:MAX_PREFILL_CANDIDATES]
    address = {n.instance_id: n.address for n in ready}
    holders = estimate.holders(node)
    seen = {c.instance_id for c in (*ranked[:NUM_REASONS], *offered)} | estimate.consulted
    seen |= {holder.instance_id for holder in holders}
    return Plan(
        decode=node,
        prefill=tuple(PrefillCandidate(c.instance_id, address[c.instance_id], c.matched_blocks) for c in prefill),
        holders=holders,
        chosen=chosen,
        decode_candidates=tuple(ranked[:NUM_REASONS]),
        prefill_candidates=tuple(offered),
        request=replace(
            request,
            in_flight={name: had for name, had in request.in_flight.items() if name in seen},
            coming={name: count for name, count in request.coming.items() if name in seen},
        ),
        usual=estimate.usual,
        seen=tuple(n for n in ready if n.instance_id in seen),
        matches={name: count for name, count in matches.items() if name in seen},
    )


class _View(NamedTuple):
    """A node as this request sees it. `salt` decides ties, `cached_tokens` are those that need no computing once its
    turn comes: it has them now, or computes them for another request that is in its queue."""

    node: NodeRecord
    instance_id: str
    salt: bytes
    matched_blocks: int
    cached_tokens: int
    queue_ms: float
    pace: Pace
    room_ms: float


class _Estimate:
    """The cost model over one snapshot. All terms come from `_View`s, made once per node."""

    def __init__(self, request: RouteRequest, nodes: Sequence[NodeRecord], matches: Mapping[str, int]) -> None:
        self._request = request
        self._matches = matches
        self.usual = request.usual or Usual.of(nodes)
        self._views = {n.instance_id: self._view(n) for n in nodes}
        self._helpers: dict[LayoutCard, list[_View]] = {}
        self._reach: dict[LayoutCard, tuple[int, str]] = {}
        self._ways: dict[str, Candidate] = {}
        prefill = (
            view
            for view in self._views.values()
            if view.node.role is Role.PREFILL and _can_hold(view.node, request.num_tokens)
        )
        self._prefill = sorted(prefill, key=lambda view: (self._helper_ms(view), view.salt))

    def rank(self, candidate: Candidate) -> tuple[float, bytes]:
        """Sort key. Ties go by the request's id, so that equal nodes share equally and a replay decides alike."""
        return candidate.cost.total_ms, self._views[candidate.instance_id].salt

    def helpers(self, decode: NodeRecord) -> list[_View]:
        """Prefill nodes whose blocks mean something to `decode`, cheapest first. A `both` node works alone."""
        if decode.role is not Role.DECODE:
            return []
        if decode.card not in self._helpers:
            self._helpers[decode.card] = [view for view in self._prefill if _can_give(view.node, decode)]
        return self._helpers[decode.card]

    @property
    def consulted(self) -> set[str]:
        """Prefill nodes that any decode node was rated with, and those that most could be pulled from."""
        helpers = {view.instance_id for views in self._helpers.values() for view in views[:1]}
        return helpers | {name for _, name in self._reach.values() if name}

    def holders(self, decode: NodeRecord) -> tuple[Holder, ...]:
        """Nodes of any role whose blocks of the prompt mean something to `decode`, most blocks first."""
        held = (view for view in self._views.values() if view.matched_blocks and _can_give(view.node, decode))
        ranked = sorted(held, key=lambda view: (-view.matched_blocks, view.queue_ms, view.salt))
        return tuple(Holder(v.instance_id, v.node.address, v.matched_blocks) for v in ranked[:MAX_HOLDERS])

    def decode(self, node: NodeRecord) -> Candidate:
        """The node with the cheapest way to compute the prompt: itself, or one of the best prefill nodes."""
        view = self._views[node.instance_id]
        way = self._computed_by(view)
        slowed_ms = self._slowed_ms(node, self._compute_ms(view.pace, view.cached_tokens, self._request.num_tokens))
        if slowed_ms:
            way = replace(way, cost=replace(way.cost, pressure_ms=way.cost.pressure_ms + slowed_ms))
        for helper in self.helpers(node)[:1]:  # what tells them apart is theirs alone: the first is best for all
            remote = self.remote(helper, node)
            if remote.cost.total_ms < way.cost.total_ms:
                way = remote
        step_ms = self._step_ms(node)
        cost = Cost(
            way.cost.queue_ms + view.room_ms,
            way.cost.compute_ms,
            way.cost.transfer_ms,
            step_ms,
            way.cost.pressure_ms + STREAM_STEPS * self._num_requests(node) * step_ms,
        )
        return Candidate(
            node.node_id,
            view.instance_id,
            view.matched_blocks,
            cost,
            way.computed_by,
            way.num_uncached,
            way.pull_ms,
        )

    def remote(self, helper: _View, decode: NodeRecord) -> Candidate:
        """A prefill node that computes for `decode`."""
        way = self._computed_by(helper)
        held = self._views[decode.instance_id].matched_blocks * decode.card.block_size
        own_rate = decode.load.pull_bytes_per_s or self.usual.bytes_per_s
        moved_ms = (
            way.cost.transfer_ms + HAND_OVER_MS + self._move_ms(decode, self._request.num_tokens - held, own_rate)
        )
        queue_ms = way.cost.queue_ms + helper.room_ms
        cost = Cost(queue_ms, way.cost.compute_ms, moved_ms, pressure_ms=way.cost.pressure_ms)
        return replace(way, cost=cost)

    def _computed_by(self, view: _View) -> Candidate:
        """Queue, pulled blocks where that is quicker than computing them, and computing.

        What a pull saves is rated as on the quickest node and the usual link: so blocks on one node never make another
        one cheaper by more than itself.
        """
        if view.instance_id in self._ways:
            return self._ways[view.instance_id]
        node, cached = view.node, view.cached_tokens
        compute_ms, pull_ms = self._compute_ms(view.pace, cached, self._request.num_tokens), 0.0
        if (extra := self._reachable(node)[0] * node.card.block_size - cached) > 0:
            move_ms = HAND_OVER_MS + self._move_ms(node, extra, self.usual.bytes_per_s)
            saved_ms = self._compute_ms(self.usual.quickest, cached, cached + extra)
            if move_ms < saved_ms:
                cached, compute_ms, pull_ms = cached + extra, max(compute_ms - saved_ms, 0.0), move_ms
        name, num_uncached = view.instance_id, self._request.num_tokens - cached
        cost = Cost(view.queue_ms, compute_ms, pull_ms, pressure_ms=(QUEUE_WEIGHT - 1.0) * view.queue_ms)
        way = Candidate(node.node_id, name, view.matched_blocks, cost, name, num_uncached, pull_ms)
        self._ways[view.instance_id] = way
        return way

    def _reachable(self, node: NodeRecord) -> tuple[int, str]:
        """The most blocks that any node holds which can give them to this one, and which node that is."""
        if node.card not in self._reach:
            held = (v for v in self._views.values() if v.matched_blocks and _can_give(v.node, node))
            best = max(held, key=lambda v: (v.matched_blocks, v.salt), default=None)
            self._reach[node.card] = (best.matched_blocks, best.instance_id) if best is not None else (0, "")
        return self._reach[node.card]

    def _helper_ms(self, helper: _View) -> float:
        return self._computed_by(helper).cost.total_ms + helper.room_ms

    def _compute_ms(self, pace: Pace, start: int, end: int) -> float:
        """Of the prompt's tokens `[start, end)`."""
        return pace.ms(end - start, num_positions(start, end))

    def _move_ms(self, node: NodeRecord, num_tokens: int, bytes_per_s: float) -> float:
        return -(-num_tokens // node.card.block_size) * node.card.block_bytes * 1e3 / bytes_per_s

    def _view(self, node: NodeRecord) -> _View:
        """The last prompt token is always computed. The queue is what the node has told, and what was sent since."""
        name, size = node.instance_id, node.card.block_size
        salt = hashlib.blake2b(f"{self._request.request_id}/{name}".encode(), digest_size=8).digest()
        most = (self._request.num_tokens - 1) // size
        matched = min(self._matches.get(name, 0), most)
        coming = min(max(matched, self._request.coming.get(name, 0)), most)
        load, mine, pace = node.load, self._mine(node), self.usual.pace.of(node.load)
        queue_ms = pace.ms(
            load.num_waiting_tokens + mine.num_prompt_tokens, load.num_waiting_positions + mine.num_positions
        )
        room_ms = self._room_ms(node, matched)
        return _View(node, name, salt, matched, coming * size, queue_ms, pace, room_ms)

    def _room_ms(self, node: NodeRecord, matched_blocks: int) -> float:
        """Until blocks for the prompt are free. Streams that run take one block each per `block_size` steps, and in
        the long run give back as many. A node that has not told its pool's size is taken to have room.

        More streams free blocks sooner, but also slow each other down: a node is taken to have as many as make room and
        pace together cheapest, if it has fewer. So no node gets better by having more to do.
        """
        size, load = node.card.block_size, node.load
        need = -(-self._request.num_tokens // size) - matched_blocks
        short = need - max(load.accounts.available - matched_blocks, 0)
        if not load.num_blocks or short <= 0:
            return 0.0
        num_steps = short * size
        fewest = math.sqrt(num_steps / STREAM_STEPS)
        num_streams = fewest if node.role is Role.PREFILL else max(fewest, self._num_requests(node))
        return num_steps / num_streams * self._step_ms(node)

    def _slowed_ms(self, node: NodeRecord, compute_ms: float) -> float:
        """What a decode node's streams, those to come too, lose to a prompt that is not short. A `both` node has no
        other way."""
        if node.role is not Role.DECODE or compute_ms <= SHORT_PROMPT_MS:
            return 0.0
        return compute_ms * (1.0 + self._request.stream_delay_weight * self._num_requests(node))

    def _num_requests(self, node: NodeRecord) -> int:
        return max(node.load.num_running + node.load.num_waiting, self._mine(node).num_requests)

    def _step_ms(self, node: NodeRecord) -> float:
        return node.load.step_ms or self.usual.step_ms

    def _mine(self, node: NodeRecord) -> InFlight:
        return self._request.in_flight.get(node.instance_id, _NOTHING)


_NOTHING = InFlight()


def _can_give(peer: NodeRecord, node: NodeRecord) -> bool:
    """Whether `peer` alone can hand blocks to `node`: same bits, and all of the node's kv-heads."""
    if node.card == peer.card:
        return True
    try:
        node.card.check_gives(peer.card, peer.node_id)
    except LayoutMismatch:
        return False
    return True


def _can_hold(node: NodeRecord, num_tokens: int) -> bool:
    """A prefill node produces nothing, so that a prompt may fill its context."""
    return num_tokens - (node.role is Role.PREFILL) < node.max_model_len


def _nobody(nodes: Sequence[NodeRecord], num_tokens: int) -> KvferryError:
    decode = [n for n in nodes if n.role is not Role.PREFILL]
    if decode and not any(_can_hold(n, num_tokens) for n in decode):
        longest = max(n.max_model_len for n in decode)
        return ContextTooLong(
            f"the prompt has {num_tokens} tokens; with one to produce the longest context of a node is {longest}",
            param="prompt",
        )
    if decode and all(n.state is NodeState.DRAINING for n in decode):
        return Draining("every decode node is draining")
    return Unavailable("no decode node is ready" if not decode else "no decode node can take the request now")
