"""One engine step as tensors: what the model reads. Made by `InputBatch` from a schedule, used once."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of all scheduled sequences, flattened in sequence order.

    Sequence i owns rows `[query_starts[i], query_starts[i + 1])`; its first row is position `context_lens[i]`, so the
    KV of positions `[0, context_lens[i])` is already in the pool and the chunk's own KV is written before attention.
    """

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + slot in block
    block_tables: torch.Tensor  # [num_seqs, max_num_blocks] int64, padded with 0
    query_starts: tuple[int, ...]  # num_seqs + 1 row offsets
    context_lens: tuple[int, ...]  # num_seqs
    logit_rows: torch.Tensor  # [num_logit_rows] int64: rows whose logits are wanted, ascending
