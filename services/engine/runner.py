"""Turns a schedule into tensors, runs the model, samples. The only place where policy meets torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.batch import Batch
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.sampler import SampledToken, SampleRow, sample
from kvferry.services.engine.scheduler import Schedule, Scheduled
from kvferry.services.engine.sequence import Sequence as Seq


def build_batch(rows: Sequence[Scheduled], block_size: int) -> Batch:
    """The step's tokens as flat tensors, in row order."""
    starts = (0, *accumulate(row.num_tokens for row in rows))
    token_ids = np.empty(starts[-1], dtype=np.int64)
    positions = np.empty(starts[-1], dtype=np.int64)
    slots = np.empty(starts[-1], dtype=np.int64)
    num_blocks = [row.sequence.num_blocks_for(row.start + row.num_tokens) for row in rows]
    tables = np.zeros((len(rows), max(num_blocks)), dtype=np.int64)
    for i, row in enumerate(rows):
        span = slice(starts[i], starts[i + 1])
        end = row.start + row.num_tokens
        tables[i, : num_blocks[i]] = row.sequence.block_table[: num_blocks[i]]
        token_ids[span] = row.sequence.token_ids[row.start : end]
        positions[span] = where = np.arange(row.start, end)
        slots[span] = tables[i, where // block_size] * block_size + where % block_size
    return Batch(
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        query_starts=starts,
        context_lens=tuple(row.start for row in rows),
        logit_rows=torch.tensor([starts[i + 1] - 1 for i, row in enumerate(rows) if row.samples], dtype=torch.int64),
    )


class TorchRunner:
    """`kv_cache`: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`."""

    def __init__(self, model: LlamaModel, kv_cache: torch.Tensor, eos_token_ids: tuple[int, ...]) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.block_size = kv_cache.shape[4]
        self.eos_token_ids = eos_token_ids

    @torch.inference_mode()
    def execute(self, schedule: Schedule) -> list[SampledToken]:
        for copy in schedule.copies:
            self.kv_cache[copy.target] = self.kv_cache[copy.source]
        batch = build_batch(schedule.rows, self.block_size)
        logits = self.model.forward(batch, self.kv_cache)
        sampling = [row.sequence for row in schedule.rows if row.samples]
        if any(seq.branches for seq in sampling):  # all samples of one prompt draw from the same logits
            logits = logits[[i for i, seq in enumerate(sampling) for _ in range(seq.num_seats)]]
        return sample(logits, [self._row(seq, one) for seq in sampling for one in (seq, *seq.branches)])

    def _row(self, seq: Seq, one: Seq) -> SampleRow:
        """How `one`, the sequence itself or a branch of it that is about to be born, draws its next token."""
        assert seq.sampling is not None
        return SampleRow(
            params=seq.sampling,
            position=seq.num_tokens,
            index=one.index,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens] if _uses_history(seq.sampling) else (),
            output_token_ids=seq.token_ids[seq.num_prompt_tokens :],
            eos_token_ids=self.eos_token_ids,
        )


def _uses_history(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty) or bool(params.frequency_penalty)
