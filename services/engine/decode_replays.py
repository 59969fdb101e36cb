"""Decode steps of few sequences on a CPU: the layers' kernels recorded once per batch size, then replayed.

What a replay computes is what the layers compute, with the same kernels and the same bits; only Python is left out.
Knows tensors and plans, no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvferry.kernels import ops

MAX_ROWS = 8
"""Sequences of a step that is replayed: with more, its kernels outlast what starting them costs."""

Layers = Callable[["LayerInputs", torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What the layers of one step read besides the weights and the pool. Only `slot_mapping` is memory of others."""

    hidden: torch.Tensor  # [num_tokens, hidden_size], overwritten
    cos_sin: torch.Tensor  # [num_tokens, head_dim]
    slot_mapping: torch.Tensor  # [num_tokens] int64
    plan: ops.AttentionPlan

    def copy_from(self, other: LayerInputs) -> None:
        """Both are of decode steps with the same number of sequences."""
        self.hidden.copy_(other.hidden)
        self.cos_sin.copy_(other.cos_sin)
        self.slot_mapping.copy_(other.slot_mapping)
        ops.refill_plan(self.plan, other.plan)


class DecodeReplays:
    """Recordings for one pool, by the number of sequences and of threads."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], tuple[LayerInputs, ops.Recording] | None] = {}
        self._kv_cache: torch.Tensor | None = None

    @staticmethod
    def takes(inputs: LayerInputs) -> bool:
        """Whether it is a decode step so small that `run` pays."""
        num_rows = len(inputs.hidden)
        return num_rows == len(inputs.plan.context_lens) and num_rows <= MAX_ROWS and ops.can_record(inputs.hidden)

    def run(self, inputs: LayerInputs, kv_cache: torch.Tensor, layers: Layers) -> torch.Tensor:
        """`layers(inputs, kv_cache)` of inputs that it `takes`; the result is valid until the next call.

        `layers` must keep the number of threads.
        """
        num_rows = len(inputs.hidden)
        if kv_cache is not self._kv_cache:
            self._found.clear()
            self._kv_cache = kv_cache
        key = num_rows, torch.get_num_threads()
        if key not in self._found:
            inputs = replace(inputs, slot_mapping=inputs.slot_mapping.clone())  # to be written to at later steps
            recording, result = ops.record(lambda: layers(inputs, kv_cache))
            self._found[key] = None if recording is None else (inputs, recording)
            return result
        if (found := self._found[key]) is None:
            return layers(inputs, kv_cache)
        own, recording = found
        own.copy_from(inputs)
        return recording()
