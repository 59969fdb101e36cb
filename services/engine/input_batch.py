"""A step's inputs, in memory that is kept from step to step and laid out so that one copy takes all to a device.

Gathered by numpy from all sequences at once: one by one, those of a large batch would take longer than some of its
kernels. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt
import torch

from kvferry.services.engine.batch import Batch
from kvferry.services.engine.schedule import Scheduled

Ints = npt.NDArray[np.int64]

ALIGNMENT = 16
"""Each input begins at a multiple of so many elements, 128 B: kernels for GPUs are compiled for the alignment of their
pointers, which must not change with the batch."""

_start, _num_tokens, _samples = attrgetter("start"), attrgetter("num_tokens"), attrgetter("samples")


class InputBatch:
    """For a pool whose blocks have `block_size` tokens. Not for two threads."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._memory = np.empty(0, dtype=np.int64)  # grows as it must

    def fill(self, rows: Sequence[Scheduled]) -> Batch:
        """The tokens of `rows`, of which there is one at least, in their order. Valid until the next call."""
        num_seqs, block_tables = len(rows), [row.sequence.block_table for row in rows]
        contexts = np.fromiter(map(_start, rows), np.int64, num_seqs)
        counts = np.fromiter(map(_num_tokens, rows), np.int64, num_seqs)
        widths = np.fromiter(map(len, block_tables), np.int64, num_seqs)
        ends = counts.cumsum()
        last_rows = ends[np.fromiter(map(_samples, rows), np.bool_, num_seqs)] - 1
        num_tokens, max_num_blocks = int(ends[-1]), int(widths.max())

        parts = _lay_out(num_tokens, num_tokens, num_tokens, len(last_rows), num_seqs * max_num_blocks)
        memory = self._room_for(parts)
        token_ids, positions, slots, logit_rows, tables = (memory[part] for part in parts)
        token_ids[:] = np.fromiter(chain.from_iterable(row.token_ids for row in rows), np.int64, num_tokens)
        logit_rows[:] = last_rows
        table_rows = tables.reshape(num_seqs, max_num_blocks)
        _fill_padded(table_rows, np.frombuffer(b"".join(block_tables), np.int64), widths)
        if num_tokens == num_seqs:
            owners = np.arange(num_seqs)
            positions[:] = contexts
        else:
            owners = np.arange(num_seqs).repeat(counts)
            positions[:] = np.arange(num_tokens) + (contexts - ends + counts)[owners]
        blocks = positions // self._block_size
        slots[:] = (table_rows[owners, blocks] - blocks) * self._block_size + positions

        on_device = torch.from_numpy(memory).to(self._device)
        inputs = [on_device[part] for part in parts]
        return Batch(
            token_ids=inputs[0],
            positions=inputs[1],
            slot_mapping=inputs[2],
            block_tables=inputs[4].view(num_seqs, max_num_blocks),
            query_starts=(0, *ends.tolist()),
            context_lens=tuple(contexts.tolist()),
            logit_rows=inputs[3],
        )

    def _room_for(self, parts: Sequence[slice]) -> Ints:
        if len(self._memory) < (end := parts[-1].stop):
            self._memory = np.empty(2 * end, dtype=np.int64)
        return self._memory[:end]


def _lay_out(*sizes: int) -> list[slice]:
    """Parts of one array, one after the other, each aligned."""
    starts = accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _fill_padded(table: Ints, values: Ints, widths: Ints) -> None:
    """`table` [num_rows, width]: the next `widths[i]` values into row i, then zeros."""
    if len(values) == table.size:
        table[:] = values.reshape(table.shape)
        return
    table[:] = 0
    table[np.arange(table.shape[1]) < widths[:, None]] = values
