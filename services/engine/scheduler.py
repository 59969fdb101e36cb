"""What the next step computes. Iteration-level, first come first served; policy only, no tensors.

A sequence simply has tokens still to compute; there is no prefill or decode phase. Order within a step: running
sequences that need one token, running ones that need more, then waiting ones. A waiting sequence starts only when
blocks for all its tokens are there, so two half-done prompts never starve each other; what it needs later, one block
at a time, is taken by preempting the newest running sequence.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvferry.common.errors import BadRequest, Overloaded, PromptExceedsPool
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_step_ms` None: prompt chunks may fill the whole token budget."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_waiting: int
    max_step_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Tokens `[start, start + num_tokens)` of one sequence; `samples`: its next token is drawn from the last one."""

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class BlockCopy:
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step. `copies` come first, in order. `admitted`: receiving sequences that got their blocks; `held`:
    compute-only ones with nothing left to do."""

    rows: list[Scheduled] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows if row.num_tokens > 1)


class StepTimes:
    """Exponentially weighted step times, from which a step's prompt share is sized."""

    def __init__(self) -> None:
        self.decode_ms = 0.0
        self.prompt_token_ms = 0.0

    def note(self, num_prompt_tokens: int, num_decodes: int, step_ms: float) -> None:
        if num_prompt_tokens >= 8:
            alone = max(step_ms - (self.decode_ms if num_decodes else 0.0), 0.25 * step_ms)
            self.prompt_token_ms = _blend(self.prompt_token_ms, alone / num_prompt_tokens)
        elif num_decodes:
            self.decode_ms = _blend(self.decode_ms, step_ms)

    @property
    def prefill_tokens_per_s(self) -> float:
        return 1000.0 / self.prompt_token_ms if self.prompt_token_ms else 0.0

    def prompt_tokens_within(self, budget_ms: float, decoding: bool) -> int | None:
        """Prompt tokens that a step of this length has room for; None before the first measurement."""
        if not self.prompt_token_ms:
            return None
        return int((budget_ms - (self.decode_ms if decoding else 0.0)) / self.prompt_token_ms)


def _blend(old: float, new: float, weight: float = 0.2) -> float:
    return old + weight * (new - old) if old else new


class Scheduler:
    """Not thread-safe: the engine's mutex guards it together with the pool."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.times = StepTimes()
        self.waiting: deque[Sequence] = deque()
        self.received: deque[Sequence] = deque()  # complete receives, and failed ones: they own their blocks
        self.running: list[Sequence] = []  # in order of arrival
        self._num_preemptions = 0
        self._num_copied_blocks = 0

    @property
    def num_seats(self) -> int:
        return sum(seq.num_seats for seq in self.running)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(seq.num_uncomputed_tokens for seq in (*self.waiting, *self.received))

    def take_counts(self) -> tuple[int, int]:
        """Preemptions and copied blocks since the last call."""
        counts = self._num_preemptions, self._num_copied_blocks
        self._num_preemptions = self._num_copied_blocks = 0
        return counts

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence. Raises PromptExceedsPool if it could never run, Overloaded if the queue is full."""
        if (need := seq.num_blocks_for(seq.num_tokens)) > self.pool.num_blocks:
            raise PromptExceedsPool(
                f"the prompt's {seq.num_prompt_tokens} tokens need {need} KV blocks of {seq.block_size} tokens; "
                f"this node's pool has {self.pool.num_blocks}"
            )
        if seq.num_seats > self.limits.max_num_seqs:
            raise BadRequest(
                f"n {seq.num_seats} exceeds this node's max_num_seqs {self.limits.max_num_seqs}", param="n"
            )
        if len(self.waiting) >= self.limits.max_num_waiting:
            raise Overloaded(f"{len(self.waiting)} requests wait on this node already: its limit is reached")
        self.waiting.append(seq)

    def drop(self, seq: Sequence) -> None:
        """Takes a sequence out wherever it stands and gives its blocks back. Not for one that a step is computing."""
        for queue in (self.waiting, self.received, self.running):
            if seq in queue:
                queue.remove(seq)
        self._give_back(seq)
        seq.status = Status.CLOSED

    def receive_ended(self, seq: Sequence, num_received_blocks: int) -> None:
        """The first `num_received_blocks` blocks of a receiving sequence hold their KV; it computes the rest."""
        assert seq.status is Status.RECEIVING, seq.status
        self.pool.arrived(seq.block_table)
        if num_received_blocks * seq.block_size > seq.num_computed_tokens:
            seq.num_received_tokens = num_received_blocks * seq.block_size - seq.num_computed_tokens
            seq.num_computed_tokens += seq.num_received_tokens
            self._name_full_blocks(seq)
        seq.receive = False
        seq.status = Status.WAITING
        self.received.append(seq)

    def schedule(self) -> Schedule:
        """The next step. Empty `rows`: nothing can run now."""
        step = Schedule()
        self._make_room_for_growth(step)
        budget = self.limits.max_num_batched_tokens
        decodes = [seq for seq in self.running if seq.num_uncomputed_tokens == 1]
        for seq in decodes:
            budget -= self._add_row(step, seq, min(1, budget))
        budget = min(budget, self._prompt_budget(bool(decodes)))
        for seq in self.running:
            if seq.num_uncomputed_tokens > 1 and budget > 0:
                budget -= self._add_row(step, seq, budget)
        while budget > 0 and self.received and self._has_seats(self.received[0]):
            budget -= self._start(step, self.received.popleft(), budget)
        self.admit(step, budget)
        return step

    def admit(self, step: Schedule, budget: int) -> None:
        """Lets waiting sequences in, first come first served, as far as blocks, seats and token budget go."""
        while self.waiting:
            seq = self.waiting[0]
            if not seq.receive and (budget <= 0 or not self._has_seats(seq)):
                return
            if not self._reserve(seq):
                return
            self.waiting.popleft()
            seq.admitted_s = seq.admitted_s or time.monotonic()
            if seq.receive and seq.num_cacheable_blocks > seq.num_named_blocks:
                seq.status = Status.RECEIVING
                step.admitted.append(seq)
            elif seq.receive:  # its blocks have come into the cache meanwhile
                seq.receive = False
                self.received.append(seq)
            else:
                budget -= self._start(step, seq, budget)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child runs on by itself from where the parent stands, sharing all blocks.

        A parent that has lost its blocks has none to share: its child is computed anew, as it will be itself.
        """
        child.token_ids = list(parent.token_ids)
        child.arrival_s, child.admitted_s = parent.arrival_s, parent.admitted_s
        child.parent = None
        if parent.status is not Status.RUNNING or parent.num_uncomputed_tokens:
            child.num_preemptions = 1
            self.waiting.appendleft(child)
            return
        child.block_table = list(parent.block_table)
        self.pool.acquire(child.block_table)
        child.names = list(parent.names)
        child.num_named_blocks = parent.num_named_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens
        child.status = Status.RUNNING
        self.running.append(child)
        self.running.sort(key=lambda s: s.arrival_s)

    def computed(self, row: Scheduled) -> None:
        """Books what a step computed for one row: its tokens, and names for the blocks that it filled."""
        row.sequence.num_computed_tokens += row.num_tokens
        self._name_full_blocks(row.sequence)

    def hold(self, seq: Sequence) -> None:
        """A compute-only sequence is complete: it leaves the batch and keeps its blocks."""
        if seq in self.running:
            self.running.remove(seq)
        seq.status = Status.HELD

    # ---- inside

    def _has_seats(self, seq: Sequence) -> bool:
        return self.num_seats + seq.num_seats <= self.limits.max_num_seqs

    def _prompt_budget(self, decoding: bool) -> int:
        if self.limits.max_step_ms is None or not decoding:
            return self.limits.max_num_batched_tokens
        fit = self.times.prompt_tokens_within(self.limits.max_step_ms, decoding)
        return max(fit, 16) if fit is not None else 32

    def _add_row(self, step: Schedule, seq: Sequence, budget: int) -> int:
        count = min(seq.num_uncomputed_tokens, budget)
        if count > 0:
            last = count == seq.num_uncomputed_tokens
            step.rows.append(Scheduled(seq, seq.num_computed_tokens, count, last and seq.sampling is not None))
        return count

    def _start(self, step: Schedule, seq: Sequence, budget: int) -> int:
        if seq.num_uncomputed_tokens == 0:  # compute-only and all of it cached
            self.hold(seq)
            step.held.append(seq)
            return 0
        seq.status = Status.RUNNING
        self.running.append(seq)
        self.running.sort(key=lambda s: s.arrival_s)
        return self._add_row(step, seq, budget)

    def _reserve(self, seq: Sequence) -> bool:
        """Takes cached and fresh blocks for all tokens of `seq`; False and nothing taken when there are too few."""
        hits = self.pool.lookup(seq.name_blocks(seq.num_cacheable_blocks)) if self.pool.enable_prefix_caching else []
        fresh = seq.num_blocks_for(seq.num_tokens) - len(hits)
        spare = self.pool.num_blocks // 100 if self.running else 0
        if fresh + self.pool.num_idle(hits) + spare > self.pool.num_available:
            return False
        self.pool.acquire(hits)
        incoming = seq.num_cacheable_blocks - len(hits) if seq.receive else 0
        tail = self.pool.allocate(incoming, incoming=True)
        seq.block_table = [*hits, *tail, *self.pool.allocate(fresh - len(tail))]
        seq.num_named_blocks = len(hits)
        seq.num_computed_tokens = len(hits) * seq.block_size
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens
        return True

    def _make_room_for_growth(self, step: Schedule) -> None:
        """Gives every running sequence the block that its next token goes into, at the expense of the newest.

        A half-filled block that branches share is copied for the one that is to write into it.
        """
        for seq in list(self.running):
            while seq.status is Status.RUNNING and (short := self._lacks_block(seq)):
                if not self.pool.num_available:
                    self._preempt(self.running[-1])
                elif short == "new":
                    seq.block_table.extend(self.pool.allocate(1))
                else:
                    step.copies.append(self._copy_on_write(seq))

    def _lacks_block(self, seq: Sequence) -> Literal["", "new", "own"]:
        if len(seq.block_table) < seq.num_blocks_for(seq.num_tokens):
            return "new"
        if seq.num_uncomputed_tokens == 0:  # a beam that waits for the others
            return ""
        at = seq.num_computed_tokens // seq.block_size
        return "own" if at >= seq.num_named_blocks and self.pool.is_shared(seq.block_table[at]) else ""

    def _copy_on_write(self, seq: Sequence) -> BlockCopy:
        at = seq.num_computed_tokens // seq.block_size
        old, (new,) = seq.block_table[at], self.pool.allocate(1)
        self.pool.release([old])
        seq.block_table[at] = new
        self._num_copied_blocks += 1
        return BlockCopy(old, new)

    def _preempt(self, seq: Sequence) -> None:
        """Gives all blocks back; the sequence will be computed again, as if nothing had happened."""
        self.running.remove(seq)
        seq.num_preemptions += 1
        seq.num_recomputed_tokens += seq.num_computed_tokens
        self._num_preemptions += 1
        self._give_back(seq)
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)

    def _give_back(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.num_named_blocks = seq.num_computed_tokens = 0

    def _name_full_blocks(self, seq: Sequence) -> None:
        full = seq.num_computed_tokens // seq.block_size
        names = seq.name_blocks(full)
        for i in range(seq.num_named_blocks, full):
            seq.block_table[i] = self.pool.register(seq.block_table[i], names[i])
        seq.num_named_blocks = full
