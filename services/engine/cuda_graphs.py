"""Decode steps on a GPU as CUDA graphs: all kernels of a step captured once per batch size, then started by one call.

A step is computed by the smallest graph that has a row for each of its sequences. Rows to spare decode a token at
position 0 whose keys and values are written nowhere. Where kernels are batch-invariant, no bit tells a graph's rows
from those of a step that Python runs. Knows tensors and batches, no model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from kvferry.services.engine.batch import Batch

Step = Callable[[], torch.Tensor]
Capture = Callable[[Step], Step]
"""Takes a step -> what does the same again, over the same memory: its result is the same tensor each time."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """What a decode step reads besides the weights and the pool: one row per sequence, int64."""

    token_ids: torch.Tensor  # [num_rows]
    positions: torch.Tensor  # [num_rows], which is also the number of tokens whose KV is in the pool
    slot_mapping: torch.Tensor  # [num_rows]; -1: written nowhere
    block_tables: torch.Tensor  # [num_rows, max_num_blocks]

    @classmethod
    def spare(cls, num_rows: int, max_num_blocks: int, device: torch.device) -> Self:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(zeros(num_rows), zeros(num_rows), zeros(num_rows) - 1, zeros(num_rows, max_num_blocks))

    def first(self, num_rows: int) -> Self:
        """Views of the first rows."""
        columns = self.token_ids, self.positions, self.slot_mapping, self.block_tables
        return type(self)(*(column[:num_rows] for column in columns))

    def fill(self, batch: Batch) -> None:
        """Puts a decode step's sequences into the first rows and makes the others spare ones."""
        num_seqs, num_blocks = batch.block_tables.shape
        self.token_ids[:num_seqs].copy_(batch.token_ids)
        self.positions[:num_seqs].copy_(batch.positions)
        self.positions[num_seqs:].zero_()
        self.slot_mapping[:num_seqs].copy_(batch.slot_mapping)
        self.slot_mapping[num_seqs:].fill_(-1)
        self.block_tables[:num_seqs, :num_blocks].copy_(batch.block_tables)


class CudaCapture:
    """Captures steps, each after a run that compiles and loads its kernels.

    All share one pool of memory: only one may run at a time, and its result is gone when another runs.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, step: Step) -> Step:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class DecodeGraphs:
    """Captured when made, over one pool: 1, 2, 4, ... sequences and `max_num_seqs`, none longer than `max_model_len`.

    Nothing else may use the device meanwhile. Raises what capturing raises, RuntimeError on CUDA. Not for two threads.
    """

    def __init__(
        self,
        decode: Callable[[DecodeRows, torch.Tensor], torch.Tensor],
        kv_cache: torch.Tensor,
        max_num_seqs: int,
        max_model_len: int,
        capture: Capture | None = None,
    ) -> None:
        """`decode(rows, kv_cache)` gives a row per row, by kernels whose launches depend on shapes alone."""
        self._kv_cache = kv_cache
        self._sizes = [*(1 << i for i in range((max_num_seqs - 1).bit_length())), max_num_seqs]
        self._rows = DecodeRows.spare(max_num_seqs, -(-max_model_len // kv_cache.shape[4]), kv_cache.device)
        capture = capture or CudaCapture()
        self._steps: dict[int, Step] = {}
        for size in reversed(self._sizes):  # the largest first: the others find room in its memory
            self._steps[size] = capture(partial(decode, self._rows.first(size), kv_cache))

    def takes(self, batch: Batch, kv_cache: torch.Tensor) -> bool:
        """Whether it is a step of decodes alone that a graph has room for."""
        num_seqs, num_blocks = batch.block_tables.shape
        num_rows, max_num_blocks = self._rows.block_tables.shape
        has_room = num_seqs <= num_rows and num_blocks <= max_num_blocks
        return has_room and len(batch.token_ids) == num_seqs and kv_cache is self._kv_cache

    def run(self, batch: Batch) -> torch.Tensor:
        """The step's result, a row per sequence, of a batch that it `takes`. Valid until the next call."""
        num_seqs = len(batch.token_ids)
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._rows.first(size).fill(batch)
        return self._steps[size]()[:num_seqs]
