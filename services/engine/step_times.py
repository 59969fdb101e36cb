"""How long steps take, and how many prompt tokens therefore fit into one."""

from __future__ import annotations

import math
from dataclasses import dataclass

_FADE = 0.98


@dataclass(slots=True)
class _Sums:
    """Of steps, faded: each weighs by the inverse of its milliseconds, so that a long one does not outweigh all."""

    tokens: float = 0.0
    positions: float = 0.0
    ms: float = 0.0
    tokens_squared: float = 0.0
    tokens_positions: float = 0.0
    positions_squared: float = 0.0

    def add(self, tokens: int, positions: int, ms: float) -> None:
        self.tokens = _FADE * self.tokens + tokens
        self.positions = _FADE * self.positions + positions
        self.ms = _FADE * self.ms + ms
        self.tokens_squared = _FADE * self.tokens_squared + tokens * tokens / ms
        self.tokens_positions = _FADE * self.tokens_positions + tokens * positions / ms
        self.positions_squared = _FADE * self.positions_squared + positions * positions / ms


class StepTimes:
    """Step times by the number of threads. What is told of them is as of the last step with prompt tokens.

    A step's prompt share is sized for the fewest threads, so that cores that are only lent make no step too long when
    they are taken back.
    """

    def __init__(self) -> None:
        self._by_threads: dict[int, _Fit] = {}
        self._last = _Fit()

    def note(
        self, num_prompt_tokens: int, num_decodes: int, step_ms: float, num_positions: int = 0, num_threads: int = 1
    ) -> None:
        """`num_positions`: those that the step's prompt tokens attended to, together."""
        fit = self._by_threads.setdefault(num_threads, _Fit())
        fit.note(num_prompt_tokens, num_decodes, step_ms, num_positions)
        if fit.knows_prompts and num_prompt_tokens:
            self._last = fit

    @property
    def prompt_token_ms(self) -> float:
        return self._last.prompt_token_ms

    @property
    def prompt_position_ms(self) -> float:
        return self._last.prompt_position_ms

    @property
    def prefill_tokens_per_s(self) -> float:
        return self._last.prefill_tokens_per_s

    @property
    def prompt_depth(self) -> float:
        return self._last.prompt_depth

    def prompt_tokens_within(self, budget_ms: float, decoding: bool, position: int = 0) -> int | None:
        """Prompt tokens from `position` on that a step of this length has room for; None: nothing measured yet."""
        measured = [num_threads for num_threads, fit in self._by_threads.items() if fit.knows_prompts]
        if not measured:
            return None
        return self._by_threads[min(measured)].prompt_tokens_within(budget_ms, decoding, position)

    def prompt_tokens_per_step(self, num_tokens: int, within_ms: float) -> int:
        """How many of `num_tokens` each step has to take for all to be done in that time beside streams."""
        fit = self._last
        if not fit.knows_prompts:
            return 0
        spare_ms = within_ms - 1000.0 * num_tokens / fit.prefill_tokens_per_s
        if spare_ms <= fit.decode_ms:
            return num_tokens
        return math.ceil(num_tokens * fit.decode_ms / spare_ms)


class _Fit:
    """Exponentially weighted.

    A prompt token takes its share of the dense layers, whatever its position, and attention over the positions before
    it: two terms, fitted by least squares over the last steps. Steps of each depth (to a factor of two) fade among
    themselves, so that many short prompts do not make the node forget what long ones take.
    """

    def __init__(self) -> None:
        self.decode_ms = 0.0
        self.prompt_token_ms = self.prompt_position_ms = 0.0
        self._recent = _Sums()
        self._by_depth: dict[int, _Sums] = {}
        self._drift = 0.0  # what the last few steps took over what the fit says

    def note(self, num_prompt_tokens: int, num_decodes: int, step_ms: float, num_positions: int = 0) -> None:
        if num_prompt_tokens >= 8:
            alone = max(step_ms - (self.decode_ms if num_decodes else 0.0), 0.25 * step_ms, 1e-6)
            self._recent.add(num_prompt_tokens, num_positions, alone)
            depth = (num_positions // num_prompt_tokens).bit_length()
            self._by_depth.setdefault(depth, _Sums()).add(num_prompt_tokens, num_positions, alone)
            self.prompt_token_ms, self.prompt_position_ms = self._solved()
            expected = self.prompt_token_ms * num_prompt_tokens + self.prompt_position_ms * num_positions
            self._drift = _blend(self._drift, alone / expected)
        elif num_decodes:
            self.decode_ms = _blend(self.decode_ms, step_ms)

    def _solved(self) -> tuple[float, float]:
        """Neither is negative. Steps that were all alike cannot tell the two apart: then tokens have all of it."""
        tokens, positions, ms, tt, tp, pp = (
            sum(getattr(sums, name) for sums in self._by_depth.values()) for name in _Sums.__dataclass_fields__
        )
        determinant = tt * pp - tp * tp
        if determinant > 1e-3 * tt * pp:
            token_ms = (pp * tokens - tp * positions) / determinant
            position_ms = (tt * positions - tp * tokens) / determinant
            if token_ms > 0.0 and position_ms > 0.0:
                return token_ms, position_ms
            if position_ms > 0.0:
                return 0.0, ms / positions
        return ms / tokens, 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Over many prompts: a step deep in a long one says little of the next."""
        return 1000.0 * self._recent.tokens / self._recent.ms if self._recent.ms else 0.0

    @property
    def prompt_depth(self) -> float:
        """Positions that the tokens of those prompts attended to, each, in the mean."""
        return self._recent.positions / self._recent.tokens if self._recent.tokens else 0.0

    @property
    def knows_prompts(self) -> bool:
        return self._drift > 0.0

    def prompt_tokens_within(self, budget_ms: float, decoding: bool, position: int) -> int:
        """`t` tokens take `(token_ms + position_ms * position) * t + position_ms * t * t / 2`."""
        room_ms = (budget_ms - (self.decode_ms if decoding else 0.0)) / self._drift
        each_ms, more_ms = self.prompt_token_ms + self.prompt_position_ms * position, self.prompt_position_ms
        if room_ms <= 0.0:
            return 0
        # the smaller root, in the form that stays exact where `more_ms` is next to nothing
        return int(2.0 * room_ms / (each_ms + math.sqrt(each_ms * each_ms + 2.0 * more_ms * room_ms)))


def _blend(old: float, new: float, weight: float = 0.2) -> float:
    return old + weight * (new - old) if old else new
