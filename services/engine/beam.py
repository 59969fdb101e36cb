"""Beam search over one prompt: which continuations live on, which are finished, and when to stop. Plain Python.

The rules are those of `transformers` (`num_beams`, `length_penalty`, `early_stopping`), so that results are equal: each
step ranks the best continuations of all beams by summed log-probability; those among the first `width` that end join
the finished ones, ranked by score / length ** length_penalty; the best `width` that do not end live on.
Sums are kept in float32, as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvferry.common.requests import BeamParams, FinishReason, TokenLogprobs

if TYPE_CHECKING:
    from kvferry.services.engine.outputs import FirstToken
    from kvferry.services.engine.sampler import SampledToken
    from kvferry.services.engine.sequence import Sequence as Seq


@dataclass(frozen=True, slots=True)
class Beam:
    """Tokens produced so far, their log-probabilities, and the sum of these."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    score: np.float32 = field(default_factory=lambda: np.float32(0))


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam; `score` is normalised by its length."""

    beam: Beam
    score: np.float32
    finish_reason: FinishReason


class BeamSearch:
    """`step` until it says that the search is over, then `results`.

    `end_token_ids` end a beam, and so do `max_tokens` tokens. `num_logprobs`: alternatives kept for each token.
    """

    def __init__(
        self, width: int, params: BeamParams, max_tokens: int, end_token_ids: frozenset[int], num_logprobs: int = 0
    ) -> None:
        self.width = width
        self.running: list[Beam] = [Beam()]
        self._params = params
        self._max_tokens = max_tokens
        self._end_token_ids = end_token_ids
        self._num_logprobs = num_logprobs
        self._finished: list[Hypothesis] = []

    @staticmethod
    def num_candidates(width: int, num_end_tokens: int) -> int:
        """Best next tokens that a beam must report, so that `width` beams can live on beside all that end."""
        return max(2, 1 + num_end_tokens) * width

    def step(self, tops: Sequence[Sequence[tuple[int, float]]]) -> list[int] | None:
        """Takes the best next tokens of each running beam; advances. For each new beam the old one that it continues,
        or None when the search is over."""
        ranked = self._rank(tops)
        ends = [self._ends(beam) for _, beam in ranked]
        if not (self._params.early_stopping == "true" and self._is_full):
            self._finish([beam for (_, beam), end in zip(ranked[: self.width], ends, strict=False) if end])
        alive = [one for one, end in zip(ranked, ends, strict=True) if not end][: self.width]
        self.running = [beam for _, beam in alive]
        return None if all(ends) or self._is_over() else [parent for parent, _ in alive]

    def results(self) -> list[Hypothesis]:
        """Up to `width` hypotheses, best first."""
        return self._finished

    @property
    def _is_full(self) -> bool:
        return len(self._finished) >= self.width

    def _rank(self, tops: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, Beam]]:
        """The best continuations of all beams with the beam that each continues, best first."""
        found = [
            (parent, token, logprob, np.float32(np.float32(logprob) + self.running[parent].score))
            for parent, top in enumerate(tops)
            for token, logprob in top
        ]
        found.sort(key=lambda one: -one[3])
        kept = self.num_candidates(self.width, len(self._end_token_ids))
        return [(parent, self._extend(parent, token, lp, score, tops)) for parent, token, lp, score in found[:kept]]

    def _extend(
        self, parent: int, token: int, logprob: float, score: np.float32, tops: Sequence[Sequence[tuple[int, float]]]
    ) -> Beam:
        old = self.running[parent]
        entry = TokenLogprobs(logprob, tuple(tops[parent][: self._num_logprobs]))
        return Beam((*old.token_ids, token), (*old.logprobs, entry), score)

    def _ends(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._end_token_ids or len(beam.token_ids) >= self._max_tokens

    def _finish(self, beams: Sequence[Beam]) -> None:
        for beam in beams:
            stopped = beam.token_ids[-1] in self._end_token_ids
            reason = FinishReason.STOP if stopped else FinishReason.LENGTH
            self._finished.append(Hypothesis(beam, self._normalised(beam.score, len(beam.token_ids)), reason))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]

    def _normalised(self, score: np.float32, length: int) -> np.float32:
        return np.float32(score / np.float32(length**self._params.length_penalty))

    def _is_over(self) -> bool:
        """Whether no running beam may still improve on the finished ones, by the rule that `early_stopping` names."""
        if not self._is_full:
            return False
        if self._params.early_stopping == "true":
            return True
        longest = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._max_tokens if longest else len(self.running[0].token_ids)
        return bool(self._normalised(self.running[0].score, length) <= self._finished[-1].score)


@dataclass(slots=True)
class BeamGroup:
    """A beam search in the engine: its running beams as sequences, and what each of them has reported for this step.

    `keys`: the choices that the results become, best first. `closed`: choices that nobody waits for any more.
    """

    search: BeamSearch
    keys: tuple[str, ...]
    members: list[Seq]
    reports: dict[str, SampledToken] = field(default_factory=dict)
    closed: set[str] = field(default_factory=set)
    num_born: int = 0
    first: FirstToken | None = None

    @property
    def is_complete(self) -> bool:
        """Every beam has reported its best next tokens."""
        return all(member.key in self.reports for member in self.members)

    @property
    def is_closed(self) -> bool:
        return len(self.closed) == len(self.keys)

    def next_key(self) -> str:
        self.num_born += 1
        return f"{self.keys[0]}~{self.num_born}"
