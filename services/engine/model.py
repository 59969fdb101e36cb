"""The Llama family as one readable forward pass over a batch and the paged pool.

Knows nothing of requests, schedules or files: `loader.py` fills it from safetensors. Every op that touches activations
comes from `kernels/ops.py`, whose promise (a row's bits depend on that row alone) is thereby the model's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from kvferry.kernels import ops
from kvferry.services.engine.batch import Batch
from kvferry.services.engine.cuda_graphs import Capture, DecodeGraphs, DecodeRows
from kvferry.services.engine.decode_replays import DecodeReplays, LayerInputs
from kvferry.services.engine.model_config import ModelConfig, RopeConfig


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: torch.Tensor  # [hidden_size]
    qkv: ops.Linear  # hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: ops.Linear  # num_heads * head_dim -> hidden_size
    mlp_norm: torch.Tensor  # [hidden_size]
    gate_up: ops.Linear  # hidden_size -> 2 * intermediate_size
    down: ops.Linear  # intermediate_size -> hidden_size


@dataclass(frozen=True, slots=True)
class ModelWeights:
    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden_size]
    head: ops.Linear  # hidden_size -> vocab_size


class LlamaModel:
    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self.choose_threads: Callable[[], None] | None = None
        """Called before a step's layers and, where it is not a replay, before each: it may change torch's threads."""
        self.enforce_eager = False
        """Whether no decode step is recorded and replayed on CPU."""
        self._decode_graphs: DecodeGraphs | None = None
        self._decode_replays = DecodeReplays()
        self._next_norms = (*(layer.attention_norm for layer in weights.layers[1:]), weights.final_norm)
        self._rope_table = rope_table(config.rope, config.head_dim, config.max_position_embeddings).to(self.device)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Writes the batch's keys and values into the pool -> float32 logits [num_logit_rows, vocab_size].

        Like `hidden`, then `logits` of the rows that are wanted.
        """
        return self.logits(self.hidden(batch, kv_cache)[batch.logit_rows])

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv_cache: torch.Tensor) -> torch.Tensor:
        """Writes the batch's keys and values into the pool -> [num_tokens, hidden_size], ready for `logits`.

        Valid until the next call. `kv_cache` is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, in
        the model's dtype, or on CPU in 16 bits.
        """
        if self.choose_threads is not None:
            self.choose_threads()
        if self._decode_graphs is not None and self._decode_graphs.takes(batch, kv_cache):
            return self._decode_graphs.run(batch)
        plan = ops.plan_attention(
            kv_cache, batch.block_tables, batch.query_starts, batch.context_lens, self.config.num_heads
        )
        inputs = self._inputs(batch.token_ids, batch.positions, batch.slot_mapping, plan)
        if not self.enforce_eager and self._decode_replays.takes(inputs):
            return self._decode_replays.run(inputs, kv_cache, self._layers)
        return self._layers(inputs, kv_cache, self.choose_threads)

    def capture_decodes(
        self, kv_cache: torch.Tensor, max_num_seqs: int, max_model_len: int, capture: Capture | None = None
    ) -> bool:
        """Captures decode steps over this pool, on a GPU as CUDA graphs, for `hidden` -> False: not possible here."""
        if not ops.can_capture(kv_cache):
            return False
        self._decode_graphs = DecodeGraphs(self._decode, kv_cache, max_num_seqs, max_model_len, capture)
        return True

    @torch.inference_mode()
    def _decode(self, rows: DecodeRows, kv_cache: torch.Tensor) -> torch.Tensor:
        """As `hidden`, of decodes alone, by kernels whose launches depend on shapes alone."""
        plan = ops.plan_decodes(kv_cache, rows.block_tables, rows.positions, self.config.num_heads)
        return self._layers(self._inputs(rows.token_ids, rows.positions, rows.slot_mapping, plan), kv_cache)

    def _inputs(
        self, token_ids: torch.Tensor, positions: torch.Tensor, slot_mapping: torch.Tensor, plan: ops.AttentionPlan
    ) -> LayerInputs:
        hidden = F.embedding(token_ids, self.weights.embedding)  # [num_tokens, hidden_size]
        cos_sin = self._rope_table[positions]  # [num_tokens, head_dim]
        return LayerInputs(hidden, cos_sin, slot_mapping, plan)

    def _layers(
        self, inputs: LayerInputs, kv_cache: torch.Tensor, choose_threads: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """Overwrites `inputs.hidden` -> what `hidden` returns."""
        config, weights, eps = self.config, self.weights, self.config.rms_norm_eps
        hidden, plan = inputs.hidden, inputs.plan
        normed = ops.rms_norm(hidden, weights.layers[0].attention_norm, eps)
        for index, layer in enumerate(weights.layers):
            if choose_threads is not None:
                choose_threads()
            qkv = layer.qkv(normed)  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
            query = ops.rotary_and_write_kv(
                qkv, inputs.cos_sin, kv_cache, index, inputs.slot_mapping, layer.q_norm, layer.k_norm, eps
            )
            attended = ops.paged_attention(query, kv_cache, index, plan, 1 / math.sqrt(config.head_dim))
            normed = ops.add_rms_norm(hidden, layer.o(attended.flatten(1)), layer.mlp_norm, eps)
            output = layer.down(ops.silu_and_mul(layer.gate_up(normed)))
            normed = ops.add_rms_norm(hidden, output, self._next_norms[index], eps)
        return normed

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `hidden`'s result -> float32 logits [num_rows, vocab_size]."""
        if not len(hidden):
            return torch.empty(0, self.config.vocab_size, device=self.device)
        return self.weights.head(hidden).float()


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """[num_positions, head_dim] float32: cosines in the first half, sines in the second.

    Angles are rounded to float32 as in transformers. Computed by numpy, whose bits do not depend on threads.
    """
    angles = np.outer(np.arange(num_positions, dtype=np.float32), _inverse_frequencies(rope, head_dim))
    table = np.empty((num_positions, head_dim), np.float32)
    for start in range(0, num_positions, 4096):  # float64 for a few rows at a time
        piece = angles[start : start + 4096].astype(np.float64)
        table[start : start + 4096] = np.concatenate((np.cos(piece), np.sin(piece)), axis=1)
    return torch.from_numpy(table)


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """[head_dim / 2] radians per position."""
    frequency = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.type == "linear":
        frequency = frequency / rope.factor
    elif rope.type == "llama3":
        # Long waves are stretched by `factor`, short ones kept, those between blended (Llama 3.1, section 3.4.2).
        waves = rope.original_max_position_embeddings * frequency / (2 * np.pi)  # waves within the old context
        blend = (waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0, 1)
        frequency = (1 - blend) * frequency / rope.factor + blend * frequency
    return frequency.astype(np.float32)
