"""One step as the scheduler decides it and the runner computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.common.nodes import num_positions
from kvferry.services.engine.sequence import Sequence


class RunnerLost(Exception):
    """Raised by a runner whose device will compute no other step either."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens `[start, start + num_tokens)` of one sequence; `samples`: its next token is drawn from the last one."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.token_ids[self.start : self.start + self.num_tokens]


@dataclass(frozen=True, slots=True)
class BlockCopy:
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step. `arrived` (blocks that peers' KV was put into) and then `copies` come first, in order. `admitted`:
    receiving sequences that got their blocks; `held`: compute-only ones with nothing left to do."""

    rows: list[Scheduled] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows if row.num_tokens > 1)

    @property
    def num_prompt_positions(self) -> int:
        """What those tokens attend to."""
        return sum(num_positions(row.start, row.start + row.num_tokens) for row in self.rows if row.num_tokens > 1)
