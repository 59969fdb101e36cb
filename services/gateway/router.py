"""Which nodes work for a request: a pure function of the request, the nodes and what they have cached.

All terms are milliseconds of predicted work, so that a cached prefix and a queue can be weighed against each other.
A cached prefix saves its computing time once; every request that a node already has costs it again, so a crowd around
a hot prefix spreads by itself. Everything it is told may be stale: a wrong choice costs time, never correctness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from kvferry.common.errors import Draining, LayoutMismatch, Unavailable
from kvferry.common.nodes import LayoutCard, NodeRecord, NodeState, Role
from kvferry.common.requests import Holder, PrefillCandidate

DEFAULT_PREFILL_TOKENS_PER_S = 1000.0  # until a node has measured its own
DEFAULT_STEP_MS = 20.0
TRANSFER_MS_PER_BLOCK = 0.1
MAX_PREFILL_CANDIDATES = 4
MAX_HOLDERS = 3
NUM_COMPARED_PREFILL = 8  # per decode node, so that large fleets stay cheap
NUM_REASONS = 16


@dataclass(frozen=True, slots=True)
class InFlight:
    """What this gateway has on a node: choices without an end, prompt tokens to compute without a first token."""

    num_requests: int = 0
    num_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """`excluded` are instances not to be used: tried already, or failing."""

    request_id: str
    num_tokens: int
    in_flight: Mapping[str, InFlight] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted milliseconds: until the prompt is computed, and what the node's running requests add."""

    queue_ms: float
    compute_ms: float
    transfer_ms: float = 0.0
    pressure_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.compute_ms + self.transfer_ms + self.pressure_ms


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node as the router saw it."""

    node_id: str
    instance_id: str
    matched_blocks: int
    cost: Cost
    computed_by: str  # instance that would compute the rest of the prompt
    num_uncached: int  # tokens of that rest

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_ms": round(self.cost.total_ms, 3)}


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision and its reasons. `prefill` is in order of preference; empty: the decode node computes.

    `holders`: whom leading blocks could be pulled from, those with most first. No cost counts on that.
    """

    request_id: str
    num_tokens: int
    decode: NodeRecord
    prefill: tuple[PrefillCandidate, ...]
    holders: tuple[Holder, ...]
    chosen: Candidate
    decode_candidates: tuple[Candidate, ...]
    prefill_candidates: tuple[Candidate, ...]

    def compact(self) -> str:
        """For a response header: `decode=d0 prefill=p0 matched=31 cost_ms=12.5`."""
        prefill = self.prefill_candidates[0].node_id if self.prefill else "none"
        cost = f"{self.chosen.cost.total_ms:.1f}"
        return f"decode={self.decode.node_id} prefill={prefill} matched={self.chosen.matched_blocks} cost_ms={cost}"

    def reasons(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "num_tokens": self.num_tokens,
            "decode": self.decode.node_id,
            "prefill": [candidate.instance_id for candidate in self.prefill],
            "holders": [asdict(holder) for holder in self.holders],
            "decode_candidates": [candidate.to_dict() for candidate in self.decode_candidates],
            "prefill_candidates": [candidate.to_dict() for candidate in self.prefill_candidates],
        }


def choose(request: RouteRequest, nodes: Sequence[NodeRecord], matches: Mapping[str, int]) -> Plan:
    """The cheapest pair. `matches`: instance id -> how many leading blocks of the prompt it holds.

    Raises Draining or Unavailable when no decode node can take the request.
    """
    ready = [n for n in nodes if n.state is NodeState.READY and n.instance_id not in request.excluded]
    decode = [n for n in ready if n.role is not Role.PREFILL]
    if not decode:
        raise _nobody(nodes)
    estimate = _Estimate(request, ready, matches)
    ranked = sorted((estimate.decode(n) for n in decode), key=estimate.rank)
    chosen = ranked[0]
    node = next(n for n in decode if n.instance_id == chosen.instance_id)
    offered = sorted((estimate.remote(helper, node) for helper in estimate.helpers(node)), key=estimate.rank)
    address = {n.instance_id: n.address for n in ready}
    return Plan(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        decode=node,
        prefill=tuple(
            PrefillCandidate(c.instance_id, address[c.instance_id], c.matched_blocks)
            for c in offered[:MAX_PREFILL_CANDIDATES]
        ),
        holders=estimate.holders(node),
        chosen=chosen,
        decode_candidates=tuple(ranked[:NUM_REASONS]),
        prefill_candidates=tuple(offered[:NUM_REASONS]),
    )


class _View(NamedTuple):
    """A node as this request sees it. `salt` decides ties, `cached_tokens` are those that need no computing."""

    node: NodeRecord
    salt: bytes
    matched_blocks: int
    cached_tokens: int
    queue_ms: float
    ms_per_token: float


class _Estimate:
    """The cost model over one snapshot. All terms come from `_View`s, made once per node."""

    def __init__(self, request: RouteRequest, nodes: Sequence[NodeRecord], matches: Mapping[str, int]) -> None:
        self._request = request
        self._matches = matches
        rates = [n.load.prefill_tokens_per_s for n in nodes if n.load.prefill_tokens_per_s > 0]
        self._usual_rate = sum(rates) / len(rates) if rates else DEFAULT_PREFILL_TOKENS_PER_S
        self._views = {n.instance_id: self._view(n) for n in nodes}
        self._helpers: dict[LayoutCard, list[_View]] = {}
        prefill = (view for view in self._views.values() if view.node.role is Role.PREFILL)
        self._prefill = sorted(prefill, key=lambda view: (self._remote_ms(view, 0), view.salt))

    def rank(self, candidate: Candidate) -> tuple[float, bytes]:
        """Sort key. Ties go by the request's id, so that equal nodes share equally and a replay decides alike."""
        return candidate.cost.total_ms, self._views[candidate.instance_id].salt

    def helpers(self, decode: NodeRecord) -> list[_View]:
        """Prefill nodes whose blocks mean something to `decode`, cheapest first. A `both` node works alone."""
        if decode.role is not Role.DECODE:
            return []
        if decode.card not in self._helpers:
            self._helpers[decode.card] = [view for view in self._prefill if _compatible(decode, view.node)]
        return self._helpers[decode.card]

    def holders(self, decode: NodeRecord) -> tuple[Holder, ...]:
        """Nodes of any role whose blocks of the prompt mean something to `decode`, most blocks first."""
        held = (view for view in self._views.values() if view.matched_blocks and _compatible(decode, view.node))
        ranked = sorted(held, key=lambda view: (-view.matched_blocks, view.queue_ms, view.salt))
        return tuple(Holder(v.node.instance_id, v.node.address, v.matched_blocks) for v in ranked[:MAX_HOLDERS])

    def decode(self, node: NodeRecord) -> Candidate:
        """The node with the cheapest way to compute the prompt: itself, or one of the best prefill nodes."""
        view = self._views[node.instance_id]
        held = view.cached_tokens
        best, best_ms = None, view.queue_ms + (self._request.num_tokens - held) * view.ms_per_token
        for helper in self.helpers(node)[:NUM_COMPARED_PREFILL]:
            if (helper_ms := self._remote_ms(helper, held)) < best_ms:
                best, best_ms = helper, helper_ms
        way = self._candidate(view, held, 0.0) if best is None else self.remote(best, node)
        cost = replace(way.cost, pressure_ms=self._pressure_ms(node))
        return replace(
            way, node_id=node.node_id, instance_id=node.instance_id, matched_blocks=view.matched_blocks, cost=cost
        )

    def remote(self, helper: _View, decode: NodeRecord) -> Candidate:
        """A prefill node that computes for `decode`."""
        held = self._views[decode.instance_id].cached_tokens
        return self._candidate(helper, max(held, helper.cached_tokens), self._transfer_ms(helper, held))

    def _candidate(self, view: _View, cached_tokens: int, transfer_ms: float) -> Candidate:
        node, num_uncached = view.node, self._request.num_tokens - cached_tokens
        cost = Cost(view.queue_ms, num_uncached * view.ms_per_token, transfer_ms)
        return Candidate(node.node_id, node.instance_id, view.matched_blocks, cost, node.instance_id, num_uncached)

    def _remote_ms(self, helper: _View, held: int) -> float:
        num_uncached = self._request.num_tokens - max(held, helper.cached_tokens)
        return helper.queue_ms + num_uncached * helper.ms_per_token + self._transfer_ms(helper, held)

    def _transfer_ms(self, helper: _View, held: int) -> float:
        return -(-(self._request.num_tokens - held) // helper.node.card.block_size) * TRANSFER_MS_PER_BLOCK

    def _view(self, node: NodeRecord) -> _View:
        """The last prompt token is always computed. A node's own word on its queue is a heartbeat old, and ours
        knows nothing of other gateways: the larger counts."""
        name, size = node.instance_id, node.card.block_size
        salt = hashlib.blake2b(f"{self._request.request_id}/{name}".encode(), digest_size=8).digest()
        matched = min(self._matches.get(name, 0), (self._request.num_tokens - 1) // size)
        queued = max(node.load.num_waiting_tokens, self._mine(node).num_prompt_tokens)
        ms_per_token = 1000.0 / (node.load.prefill_tokens_per_s or self._usual_rate)
        return _View(node, salt, matched, matched * size, queued * ms_per_token, ms_per_token)

    def _pressure_ms(self, node: NodeRecord) -> float:
        requests = max(node.load.num_running + node.load.num_waiting, self._mine(node).num_requests)
        return requests * (node.load.step_ms or DEFAULT_STEP_MS)

    def _mine(self, node: NodeRecord) -> InFlight:
        return self._request.in_flight.get(node.instance_id, _NOTHING)


_NOTHING = InFlight()


def _compatible(one: NodeRecord, other: NodeRecord) -> bool:
    try:
        one.card.check_compatible(other.card, other.node_id)
    except LayoutMismatch:
        return False
    return True


def _nobody(nodes: Sequence[NodeRecord]) -> Unavailable:
    decode = [n for n in nodes if n.role is not Role.PREFILL]
    if decode and all(n.state is NodeState.DRAINING for n in decode):
        return Draining("every decode node is draining")
    return Unavailable("no decode node is ready" if not decode else "no decode node can take the request now")
