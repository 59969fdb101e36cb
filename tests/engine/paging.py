"""Drives a model over a poisoned pool with scattered blocks, without scheduler or block pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from kvferry.services.engine.batch import Batch
from kvferry.services.engine.model import LlamaModel


@dataclass
class PagedSequence:
    """Token ids, and how many of them have their KV in the pool."""

    token_ids: list[int]
    num_computed: int = 0
    table: list[int] = field(default_factory=list)


class PagedModel:
    """A model and a pool of NaN whose blocks are handed out in random order; in the model's dtype by default."""

    def __init__(
        self,
        model: LlamaModel,
        num_blocks: int = 200,
        block_size: int = 16,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        config = model.config
        dims = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        self.model, self.block_size = model, block_size
        self.kv_cache = torch.full(dims, torch.nan, dtype=kv_dtype or model.dtype, device=model.device)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
        self._free: list[int] = order.tolist()

    def take_blocks(self, num_tokens: int) -> list[int]:
        """Blocks with random keys and values for so many positions, the same in every pool."""
        table = [self._free.pop() for _ in range(-(-num_tokens // self.block_size))]
        generator = torch.Generator().manual_seed(num_tokens)
        for i, block in enumerate(table):
            filled = self.kv_cache[block, :, :, :, : num_tokens - i * self.block_size]
            filled.copy_(torch.randn(filled.shape, generator=generator))
        return table

    def step(
        self, work: Sequence[tuple[PagedSequence, int]], wanted: Literal["last", "all", "none"] = "last"
    ) -> torch.Tensor:
        """Computes the next so many tokens of each sequence -> logits of its last row, of all rows, or of none."""
        token_ids, positions, slots, starts = list[int](), list[int](), list[int](), [0]
        for seq, count in work:
            span = range(seq.num_computed, seq.num_computed + count)
            while len(seq.table) * self.block_size < span.stop:
                seq.table.append(self._free.pop())
            token_ids += seq.token_ids[span.start : span.stop]
            positions += span
            slots += [seq.table[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            starts.append(len(token_ids))
        width = max(len(seq.table) for seq, _ in work)
        rows = {"last": [start - 1 for start in starts[1:]], "all": list(range(len(token_ids))), "none": []}[wanted]
        device = self.model.device
        batch = Batch(
            token_ids=torch.tensor(token_ids, device=device),
            positions=torch.tensor(positions, device=device),
            slot_mapping=torch.tensor(slots, device=device),
            block_tables=torch.tensor([seq.table + [0] * (width - len(seq.table)) for seq, _ in work], device=device),
            query_starts=tuple(starts),
            context_lens=tuple(seq.num_computed for seq, _ in work),
            logit_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        )
        logits = self.model.forward(batch, self.kv_cache)
        for seq, count in work:
            seq.num_computed += count
        return logits

    def prefill(self, token_ids: Sequence[int], chunk: int) -> tuple[PagedSequence, torch.Tensor]:
        """The sequence, computed alone in chunks, and the logits of every position."""
        seq = PagedSequence(list(token_ids))
        logits = []
        while seq.num_computed < len(seq.token_ids):
            logits.append(self.step([(seq, min(chunk, len(seq.token_ids) - seq.num_computed))], "all"))
        return seq, torch.cat(logits)
