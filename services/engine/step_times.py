"""How long steps take, and how many prompt tokens therefore fit into one."""

from __future__ import annotations

_FADE = 0.98


class StepTimes:
    """Exponentially weighted step times, from which a step's prompt share is sized."""

    def __init__(self) -> None:
        self.decode_ms = 0.0
        self.prompt_token_ms = 0.0
        self._prompt_tokens = self._prompt_ms = 0.0  # of the last hundred steps or so

    def note(self, num_prompt_tokens: int, num_decodes: int, step_ms: float) -> None:
        if num_prompt_tokens >= 8:
            alone = max(step_ms - (self.decode_ms if num_decodes else 0.0), 0.25 * step_ms)
            self.prompt_token_ms = _blend(self.prompt_token_ms, alone / num_prompt_tokens)
            self._prompt_tokens = _FADE * self._prompt_tokens + num_prompt_tokens
            self._prompt_ms = _FADE * self._prompt_ms + alone
        elif num_decodes:
            self.decode_ms = _blend(self.decode_ms, step_ms)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Over many prompts: a step deep in a long one says little of the next."""
        return 1000.0 * self._prompt_tokens / self._prompt_ms if self._prompt_ms else 0.0

    def prompt_tokens_within(self, budget_ms: float, decoding: bool) -> int | None:
        """Prompt tokens that a step of this length has room for; None before the first measurement."""
        if not self.prompt_token_ms:
            return None
        return int((budget_ms - (self.decode_ms if decoding else 0.0)) / self.prompt_token_ms)


def _blend(old: float, new: float, weight: float = 0.2) -> float:
    return old + weight * (new - old) if old else new
