"""What the rows of a step are sampled with: a table with a row for each, by which the whole batch is drawn at once.

A sequence's row of it says the same at every step, so it is packed once and kept; a step joins them. Only what a row's
logits are edited by (tokens so far, lists, grammars), which no table holds, is told row by row, of those that need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Self

import numpy as np
import numpy.typing as npt

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.grammar import Mask

Ints = npt.NDArray[np.int64]
Table = npt.NDArray[np.void]

_COLUMNS = {
    "temperature": "d",
    "top_p": "d",
    "min_p": "d",
    "top_k": "q",
    "num_logprobs": "q",  # -1: none are wanted, not even the token's own
    "seed": "Q",
    "index": "q",
    "may_edit": "q",  # whether parameters may change its logits
}
"""By name their types, in the letters that `struct` and numpy share."""

_ROW, _DTYPE = Struct("=" + "".join(_COLUMNS.values())), np.dtype(list(_COLUMNS.items()))


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits is sampled with.

    `position` is the index of the token being drawn, counted from the start of the prompt; `index` the choice's.
    The prompt is read only where penalties are in use, the output also for bad words and (its length) min_tokens.
    """

    params: SamplingParams
    position: int
    index: int = 0
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    mask: Mask | None = None

    @property
    def is_edited(self) -> bool:
        """Whether parameters change its logits before the greedy choice or the draw."""
        return _always_edits(self.params) or self.is_early

    @property
    def is_early(self) -> bool:
        """Whether it may not end yet."""
        return len(self.output_token_ids) < self.params.min_tokens


def uses_history(p: SamplingParams) -> bool:
    """Whether tokens of prompt and output are punished."""
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


def _always_edits(p: SamplingParams) -> bool:
    return uses_history(p) or bool(p.logit_bias) or bool(p.allowed_token_ids) or bool(p.bad_words)


def pack(params: SamplingParams, index: int) -> bytes:
    """A row of the table: of the choice `index`."""
    p = params
    return _ROW.pack(
        p.temperature,
        p.top_p,
        p.min_p,
        min(p.top_k, 2**31),  # more than any vocabulary has
        -1 if p.logprobs is None else p.logprobs,
        p.seed & 2**64 - 1,
        index,
        _always_edits(p) or p.min_tokens > 0,
    )


def join(packed: Sequence[bytes]) -> Table:
    return np.frombuffer(b"".join(packed), _DTYPE)


@dataclass(frozen=True, slots=True)
class SampleRows:
    """`positions` as in `SampleRow`; `edited`, by number: the rows whose logits are changed before the choice."""

    table: Table  # [n]
    positions: Ints  # [n]
    edited: Mapping[int, SampleRow]

    @classmethod
    def of(cls, rows: Sequence[SampleRow]) -> Self:
        table = join([pack(row.params, row.index) for row in rows])
        positions = np.array([row.position for row in rows], dtype=np.int64)
        edited = {i: row for i, row in enumerate(rows) if row.is_edited or row.mask is not None}
        return cls(table, positions, edited)

    def __len__(self) -> int:
        return len(self.table)

    def take(self, rows: Ints) -> Self:
        edited = {i: self.edited[row] for i, row in enumerate(rows.tolist()) if row in self.edited}
        return type(self)(self.table[rows], self.positions[rows], edited)
