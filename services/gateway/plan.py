"""What the router is asked, and what it answers: plain data with its reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvferry.common.nodes import NodeLoad, NodeRecord, Role
from kvferry.common.requests import Holder, PrefillCandidate

DEFAULT_PREFILL_TOKENS_PER_S = 1000.0  # until a node has measured its own
DEFAULT_STEP_MS = 20.0
DEFAULT_BYTES_PER_S = 1e9
DEFAULT_STREAM_DELAY_WEIGHT = 4.0
PACE_NOISE = 0.25
"""A node whose prompts took no more than so much longer or shorter than at the fleet's pace is taken to have that."""

RouteKind = Literal["local", "remote_prefill", "cached"]


@dataclass(frozen=True, slots=True)
class InFlight:
    """What this gateway has on a node: choices without an end, prompt tokens that its last report cannot know of, and
    what those attend to."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_positions: int = 0


@dataclass(frozen=True, slots=True)
class Pace:
    """What a prompt token takes as such, and for each position that it attends to."""

    token_ms: float = 1000.0 / DEFAULT_PREFILL_TOKENS_PER_S
    position_ms: float = 0.0

    @classmethod
    def told_by(cls, load: NodeLoad) -> Pace | None:
        """None: not measured yet. `position_ms` 0: it has computed too few long prompts to tell."""
        if load.prompt_token_ms or load.prompt_position_ms:
            return cls(load.prompt_token_ms, load.prompt_position_ms)
        return cls(1000.0 / load.prefill_tokens_per_s) if load.prefill_tokens_per_s else None

    @classmethod
    def mean(cls, loads: Iterable[NodeLoad]) -> Pace:
        """Of those that can tell both terms; of all while nobody can."""
        told = [pace for load in loads if (pace := cls.told_by(load)) is not None]
        paces = [pace for pace in told if pace.position_ms] or told or [cls()]
        count = len(paces)
        return cls(sum(pace.token_ms for pace in paces) / count, sum(pace.position_ms for pace in paces) / count)

    def ms(self, num_tokens: float, num_positions: float) -> float:
        return self.token_ms * num_tokens + self.position_ms * num_positions

    def of(self, load: NodeLoad) -> Pace:
        """A node's, where this is the fleet's: as many times slower as its prompts took longer.

        Its own two terms fit what it has computed, and say next to nothing of what is longer or shorter than that.
        """
        if not load.prefill_tokens_per_s or not load.prompt_depth:
            return self
        times = 1000.0 / load.prefill_tokens_per_s / self.ms(1.0, load.prompt_depth)
        return self if abs(times - 1.0) <= PACE_NOISE else Pace(times * self.token_ms, times * self.position_ms)


@dataclass(frozen=True, slots=True)
class Usual:
    """What a node is taken for that has not measured its own: the mean of those that have. And the best of them."""

    pace: Pace = Pace()
    step_ms: float = DEFAULT_STEP_MS
    bytes_per_s: float = DEFAULT_BYTES_PER_S
    quickest: Pace = Pace()

    @classmethod
    def of(cls, nodes: Sequence[NodeRecord]) -> Usual:
        def mean(measured: Iterable[float], otherwise: float) -> float:
            known = [value for value in measured if value > 0]
            return sum(known) / len(known) if known else otherwise

        pace = Pace.mean(n.load for n in nodes)
        return cls(
            pace,
            mean((n.load.step_ms for n in nodes if n.role is not Role.PREFILL), DEFAULT_STEP_MS),
            mean((n.load.pull_bytes_per_s for n in nodes), DEFAULT_BYTES_PER_S),
            min((pace.of(n.load) for n in nodes), key=lambda own: (own.token_ms, own.position_ms), default=pace),
        )


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """`excluded` are instances not to be used: tried already, or failing. `usual` None: that of the nodes at hand.

    `coming`: how many leading blocks of the prompt an instance has been asked to compute, for a request before this.
    `stream_delay_weight`: what a millisecond that a running stream loses to a prompt in its node's steps weighs against
    one of this request's first token."""

    request_id: str
    num_tokens: int
    in_flight: Mapping[str, InFlight] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    usual: Usual | None = None
    coming: Mapping[str, int] = field(default_factory=dict)
    stream_delay_weight: float = DEFAULT_STREAM_DELAY_WEIGHT


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted milliseconds. The first four sum to the time to the first token: work that is before this request
    (and room that it has to wait for), its own uncached tokens, its blocks on their way, one step of the decode node.
    `pressure_ms` is what this request and those that run on the decode node do to each other."""

    queue_ms: float
    compute_ms: float
    transfer_ms: float = 0.0
    step_ms: float = 0.0
    pressure_ms: float = 0.0

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.compute_ms + self.transfer_ms + self.step_ms

    @property
    def total_ms(self) -> float:
        return self.ttft_ms + self.pressure_ms


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node as the router saw it."""

    node_id: str
    instance_id: str
    matched_blocks: int
    cost: Cost
    computed_by: str  # instance that would compute the rest of the prompt
    num_uncached: int  # tokens of that rest
    pull_ms: float = 0.0  # of `cost.transfer_ms`, before it is computed

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ttft_ms": round(self.cost.ttft_ms, 3), "total_ms": round(self.cost.total_ms, 3)}


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision and its reasons. `prefill` is in order of preference; empty: the decode node computes. A short
    prompt it computes in any case, and takes the others as its way out.

    `holders`: whom leading blocks could be pulled from, those with most first. No cost counts on that.
    `seen`: the nodes that any of this was decided by, from which the same decision follows again.
    """

    decode: NodeRecord
    prefill: tuple[PrefillCandidate, ...]
    holders: tuple[Holder, ...]
    chosen: Candidate
    decode_candidates: tuple[Candidate, ...]
    prefill_candidates: tuple[Candidate, ...]
    request: RouteRequest
    usual: Usual
    seen: tuple[NodeRecord, ...]
    matches: Mapping[str, int]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return self.request.num_tokens

    @property
    def computer(self) -> NodeRecord:
        """Who computes what is not cached of the prompt."""
        return next(node for node in self.seen if node.instance_id == self.chosen.computed_by)

    @property
    def is_local_by_choice(self) -> bool:
        """The decode node computes, though prefill nodes could."""
        return bool(self.prefill_candidates) and not self.prefill

    @property
    def ttft_ms(self) -> float:
        """Predicted."""
        return self.chosen.cost.ttft_ms

    @property
    def kind(self) -> RouteKind:
        """Who is counted on for most of the prompt: caches, another node, or the decode node."""
        if 2 * self.chosen.num_uncached < self.num_tokens:
            return "cached"
        return "local" if self.chosen.computed_by == self.decode.instance_id else "remote_prefill"

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
