"""What an engine step tells the service around it. Snapshots: the sequences themselves stay with the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Self

from kvferry.common.errors import KvferryError
from kvferry.common.requests import FinishReason, TokenLogprobs
from kvferry.services.engine.block_pool import NameChanges
from kvferry.services.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class FirstToken:
    """How a sequence came to its first token. Times are `time.monotonic` seconds."""

    cached_tokens: int
    received_tokens: int
    computed_tokens: int
    arrival_s: float
    admitted_s: float
    received_s: float  # 0.0 when nothing was received
    token_s: float
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @classmethod
    def of(cls, seq: Sequence) -> Self:
        """At the moment when the prompt is computed."""
        return cls(
            cached_tokens=seq.num_cached_tokens,
            received_tokens=seq.num_received_tokens,
            computed_tokens=max(seq.num_prompt_tokens - seq.num_cached_tokens - seq.num_received_tokens, 0),
            arrival_s=seq.arrival_s,
            admitted_s=seq.admitted_s,
            received_s=seq.received_s,
            token_s=time.monotonic(),
            prompt_logprobs=tuple(seq.prompt_logprobs),
        )


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of one sequence; with `finish_reason` the sequence is closed and its blocks are given back."""

    key: str
    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    first: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class BlocksOutput:
    """A compute-only sequence has its first `len(block_ids)` blocks complete.

    `complete`: there will be no more; the sequence holds its blocks until it is closed.
    """

    key: str
    block_ids: tuple[int, ...]
    complete: bool
    cached_tokens: int
    received_tokens: int
    arrival_s: float
    admitted_s: float
    computed_s: float

    @classmethod
    def of(cls, seq: Sequence, complete: bool) -> Self:
        return cls(
            key=seq.key,
            block_ids=tuple(seq.block_table[: seq.num_computed_tokens // seq.block_size]),
            complete=complete,
            cached_tokens=seq.num_cached_tokens,
            received_tokens=seq.num_received_tokens,
            arrival_s=seq.arrival_s,
            admitted_s=seq.admitted_s,
            computed_s=time.monotonic(),
        )


@dataclass(frozen=True, slots=True)
class AdmittedOutput:
    """A receiving sequence owns blocks for its whole prompt: copy blocks `[first_block, ...)` into `block_ids`."""

    key: str
    first_block: int
    block_ids: tuple[int, ...]

    @classmethod
    def of(cls, seq: Sequence) -> Self:
        first = seq.num_named_blocks
        return cls(seq.key, first, tuple(seq.block_table[first : seq.num_cacheable_blocks]))


@dataclass(frozen=True, slots=True)
class FailedOutput:
    """The sequence is ended by a failure of the engine, and closed, too, unless it is compute-only."""

    key: str
    error: KvferryError


@dataclass(frozen=True, slots=True)
class StepStats:
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_copied_blocks: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    tokens: list[TokenOutput] = field(default_factory=list)
    blocks: list[BlocksOutput] = field(default_factory=list)
    admitted: list[AdmittedOutput] = field(default_factory=list)
    failed: list[FailedOutput] = field(default_factory=list)
    changes: NameChanges = field(default_factory=lambda: NameChanges([], []))
    cancel_to_free_s: list[float] = field(default_factory=list)  # of each cancelled sequence whose blocks are back
    stats: StepStats = field(default_factory=StepStats)

    def __bool__(self) -> bool:
        c = self.changes
        parts = (self.tokens, self.blocks, self.admitted, self.failed, c.stored, c.removed, self.cancel_to_free_s)
        return any(map(bool, parts)) or bool(self.stats.seconds)
