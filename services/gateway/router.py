"""Which nodes work for a request: a pure function of the request, the nodes and what they have cached.

All terms are milliseconds of predicted work, so that a cached prefix and a queue can be weighed against each other.
A cached prefix saves its computing time once; every request that a node already has costs it again, so a crowd around
a hot prefix spreads by itself. Everything it is told may be stale: a wrong choice costs time, never correctness.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.common.errors import Draining, LayoutMismatch, Unavailable
from kvferry.common.nodes import LayoutCard, NodeRecord, NodeState, Role
from kvferry.common.requests import PrefillCandidate

DEFAULT_PREFILL_TOKENS_PER_S = 1000.0  # until a node has measured its own
DEFAULT_STEP_MS = 20.0
TRANSFER_MS_PER_BLOCK = 0.1
MAX_PREFILL_CANDIDATES = 4
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
    """The decision and its reasons. `prefill` is in order of preference; empty: the decode node computes."""

    request_id: str
    num_tokens: int
    decode: NodeRecord
    prefill: tuple[PrefillCandidate, ...]
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
    helpers = estimate.helpers(node)
    offered = sorted((estimate.remote(n, node) for n in helpers), key=estimate.rank)
    address = {n.instance_id: n.address for n in helpers}
    return Plan(
        request_id=request.request_id,
        num_tokens=request.num_tokens,
        decode=node,
        prefill=tuple(
            PrefillCandidate(c.instance_id, address[c.instance_id], c.matched_blocks)
            for c in offered[:MAX_PREFILL_CANDIDATES]
        ),
        chosen=chosen,
        decode_candidates=tuple(ranked[:NUM_REASONS]),
        prefill_candidates=tuple(offered[:NUM_REASONS]),
    )


class _Estimate:
    """The cost model over one snapshot."""

    def __init__(self, request: RouteRequest, nodes: Sequence[NodeRecord], matches: Mapping[str, int]) -> None:
        self._request = request
        self._matches = matches
        rates = [n.load.prefill_tokens_per_s for n in nodes if n.load.prefill_tokens_per_s > 0]
        self._usual_rate = sum(rates) / len(rates) if rates else DEFAULT_PREFILL_TOKENS_PER_S
        self._salts: dict[str, bytes] = {}
        self._helpers: dict[LayoutCard, list[NodeRecord]] = {}
        prefill = (n for n in nodes if n.role is Role.PREFILL)
        self._prefill = sorted(prefill, key=lambda n: self.rank(self.remote(n, None)))

    def helpers(self, decode: NodeRecord) -> list[NodeRecord]:
        """Prefill nodes whose blocks mean something to `decode`, cheapest first. A `both` node works alone."""
        if decode.role is not Role.DECODE:
            return []
        if decode.card not in self._helpers:
            self._helpers[decode.card] = [n for n in self._prefill if _compatible(decode, n)]
        return self._helpers[decode.card]

    def rank(self, candidate: Candidate) -> tuple[float, bytes, str]:
        """Sort key. Ties go by the request's id, so that equal nodes share equally and a replay decides alike."""
        name = candidate.instance_id
        if name not in self._salts:
            self._salts[name] = hashlib.blake2b(f"{self._request.request_id}/{name}".encode(), digest_size=8).digest()
        return candidate.cost.total_ms, self._salts[name], name

    def decode(self, node: NodeRecord) -> Candidate:
        """The node with the cheapest way to compute the prompt: itself, or one of the best prefill nodes."""
        ways = [self._local(node)]
        ways += [self.remote(helper, node) for helper in self.helpers(node)[:NUM_COMPARED_PREFILL]]
        best = min(ways, key=self.rank)
        cost = Cost(best.cost.queue_ms, best.cost.compute_ms, best.cost.transfer_ms, self._pressure_ms(node))
        return self._candidate(node, cost, best.computed_by, best.num_uncached)

    def remote(self, node: NodeRecord, decode: NodeRecord | None) -> Candidate:
        """A prefill node that computes for `decode` (None: for one that has nothing cached)."""
        held = self._cached_tokens(decode) if decode is not None else 0
        num_uncached = self._request.num_tokens - max(held, self._cached_tokens(node))
        num_moved = -(-(self._request.num_tokens - held) // node.card.block_size)
        cost = Cost(
            queue_ms=self._ms(node, self._queued_tokens(node)),
            compute_ms=self._ms(node, num_uncached),
            transfer_ms=num_moved * TRANSFER_MS_PER_BLOCK,
        )
        return self._candidate(node, cost, node.instance_id, num_uncached)

    def _local(self, node: NodeRecord) -> Candidate:
        num_uncached = self._request.num_tokens - self._cached_tokens(node)
        cost = Cost(self._ms(node, self._queued_tokens(node)), self._ms(node, num_uncached))
        return self._candidate(node, cost, node.instance_id, num_uncached)

    def _candidate(self, node: NodeRecord, cost: Cost, computed_by: str, num_uncached: int) -> Candidate:
        return Candidate(node.node_id, node.instance_id, self._matched(node), cost, computed_by, num_uncached)

    def _matched(self, node: NodeRecord) -> int:
        """Leading blocks held, of those that help: the last prompt token is always computed."""
        return min(self._matches.get(node.instance_id, 0), (self._request.num_tokens - 1) // node.card.block_size)

    def _cached_tokens(self, node: NodeRecord) -> int:
        return self._matched(node) * node.card.block_size

    def _mine(self, node: NodeRecord) -> InFlight:
        return self._request.in_flight.get(node.instance_id, InFlight())

    def _queued_tokens(self, node: NodeRecord) -> int:
        """The node's own word is a heartbeat old, ours knows nothing of other gateways: the larger counts."""
        return max(node.load.num_waiting_tokens, self._mine(node).num_prompt_tokens)

    def _pressure_ms(self, node: NodeRecord) -> float:
        requests = max(node.load.num_running + node.load.num_waiting, self._mine(node).num_requests)
        return requests * (node.load.step_ms or DEFAULT_STEP_MS)

    def _ms(self, node: NodeRecord, tokens: int) -> float:
        return 1000.0 * tokens / (node.load.prefill_tokens_per_s or self._usual_rate)


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
