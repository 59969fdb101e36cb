"""What a scheduler may fill a step and its queue with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """None and a threshold of 0: no such limit. Without `max_step_ms` prompt chunks may fill the whole token budget.

    Where the prompts that wait would take longer than `max_prompt_wait_ms` that way, steps may take as much longer than
    `max_step_ms` as keeps them within it, or are not bounded at all.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    max_step_ms: float | None = None
    max_prompt_wait_ms: float | None = None
    max_num_waiting_tokens: int | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    long_prefill_token_threshold: int = 0
    max_num_preemptions: int | None = None
    max_model_len: int | None = None
