"""What the next step computes. Iteration-level; policy only, no tensors.

A sequence simply has tokens still to compute; there is no prefill or decode phase. Order within a step: running
sequences that need one token, running ones that need more, then waiting ones. A waiting sequence starts only when
blocks for all its tokens are there, so two half-done prompts never starve each other; what it needs later, one block
at a time, is taken by preempting the last running sequence in order.

Order is arrival, or priority and then arrival (`waiting.py`). Nobody starves, because
  - nobody passes the first in the queue, however small: it gets the next blocks and seats that come free. Those behind
    it wait for it to start, which is at the latest when the sequences that run now have ended. Only while it waits for
    a step's tokens alone may those that are to receive their KV take blocks that it does not need;
  - of those with seats to wait for, the ones that own their blocks already (`received`) go first, unless one has more
    to compute than the step has room for and the first in the queue came before it;
  - a running prompt leaves half of a step's prompt tokens to running ones after it, and to `received` ones and the
    first in the queue that half is all they need, so that no long prompt keeps out what is small or has its KV;
  - a chunk of one prompt takes at most `long_prefill_token_threshold` tokens of a step, so that more progress;
  - under `priority`, a sequence is overtaken by at most `waiting.MAX_OVERTAKEN` later ones;
  - a sequence (not a beam) that was preempted `max_num_preemptions` times reserves blocks for all that it may still
    produce when it starts again, and then runs to its end: it lacks no block, and it is no victim while others are.
"""

from __future__ import annotations

import time

from kvferry.common.errors import BadRequest, PromptExceedsPool
from kvferry.services.engine.backlog import Backlog
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.block_tables import BlockTables, Need
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.schedule import Schedule, Scheduled
from kvferry.services.engine.sequence import Sequence, Status
from kvferry.services.engine.shares import goes_first, num_startable, share_out
from kvferry.services.engine.step_times import StepTimes
from kvferry.services.engine.waiting import WaitingQueue, order

WATERMARK = 0.01
"""Part of the pool that no newcomer gets while others run: room for them to grow before one must be preempted."""


class Scheduler:
    """Not thread-safe: the engine's mutex guards it together with the pool."""

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.limits = limits
        self.times = StepTimes()
        self.waiting = WaitingQueue(limits.max_num_waiting, limits.max_num_waiting_tokens)
        self.received = WaitingQueue()  # complete receives, and failed ones: they own their blocks
        self._tables = BlockTables(pool)
        self._arrived: list[int] = []  # blocks received since the last step
        self.running: list[Sequence] = []  # in order
        self.backlog = Backlog(pool, self.running, self.received, self.waiting)
        self._short: Sequence | None = None  # the last one that found too few blocks
        self._num_preemptions = 0
        self._num_copied_blocks = 0

    @property
    def num_seats(self) -> int:
        return sum(seq.num_seats for seq in self.running)

    @property
    def lacks_blocks(self) -> bool:
        """Whether the first in the queue waits for blocks."""
        return bool(self.waiting) and self.waiting.first is self._short

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
        if seq.priority and self.limits.policy == "fcfs":
            raise BadRequest(
                f"priority {seq.priority}: this node runs with --scheduling-policy fcfs, where it must be 0",
                param="priority",
            )
        self.waiting.add(seq)
        self.backlog.entered(seq)

    def drop(self, seq: Sequence) -> None:
        """Takes a sequence out wherever it stands and gives its blocks back. Not for one that a step is computing."""
        for queue in (self.waiting, self.received, self.running):
            if seq in queue:
                queue.remove(seq)
        self._tables.give_back(seq)
        seq.status = Status.CLOSED

    def receive_ended(self, seq: Sequence, num_received_blocks: int) -> None:
        """The first `num_received_blocks` blocks of a receiving sequence hold their KV; it computes the rest."""
        assert seq.status is Status.RECEIVING, seq.status
        self._arrived += self._tables.received(seq, num_received_blocks)
        seq.receive = False
        seq.status = Status.WAITING
        self.received.insert(seq)

    def schedule(self) -> Schedule:
        """The next step. Empty `rows`: nothing can run now."""
        step = Schedule()
        self._make_room_for_growth(step)
        budget = self.limits.max_num_batched_tokens
        decodes = [seq for seq in self.running if seq.num_uncomputed_tokens == 1]
        for seq in decodes:
            budget -= self._add_row(step, seq, min(1, budget))
        budget = self._continue_prompts(step, min(budget, self._prompt_budget(bool(decodes))))
        self._start_more(step, budget)
        while not step.rows and self.running and (self.waiting or self.received):
            self._preempt(step, self._victim())  # only beams run, and they wait for others that have no room
            self._start_more(step, budget)
        if step.rows:  # nothing can have been computed in these blocks before
            step.arrived.extend(self._arrived)
            self._arrived.clear()
        return step

    def _continue_prompts(self, step: Schedule, budget: int) -> int:
        """Gives running prompts their chunks -> what is left of `budget`."""
        if not (prompts := [seq for seq in self.running if seq.num_uncomputed_tokens > 1]):
            return budget
        others = num_startable([*self._received_dues(), *self._first_due()], budget)
        dues = [seq.num_uncomputed_tokens for seq in prompts]
        counts = share_out(dues, others, budget, self.limits.long_prefill_token_threshold)
        return budget - sum(self._add_row(step, seq, count) for seq, count in zip(prompts, counts, strict=True))

    def _received_dues(self) -> list[int]:
        """Of those that have a seat, tokens to compute."""
        num_seats, dues = self.num_seats, []
        for seq in self.received:
            if (num_seats := num_seats + seq.num_seats) > self.limits.max_num_seqs:
                break
            dues.append(seq.num_uncomputed_tokens)
        return dues

    def _first_due(self) -> list[int]:
        """Tokens that the first in the queue has to compute; nothing: it has no seat or no blocks, or is to receive."""
        if not self.waiting or (first := self.waiting.first).receive:
            return []
        num_seats = self.num_seats + sum(seq.num_seats for seq in self.received) + first.num_seats
        if num_seats > self.limits.max_num_seqs:
            return []
        need = self._need(first)
        if need.num_blocks > self._num_free_for_newcomers:
            return []
        return [first.num_tokens - len(need.hits) * first.block_size]

    def _start_more(self, step: Schedule, budget: int) -> None:
        while budget > 0 and self.received and self._has_seats(first := self.received.first):
            earlier = bool(self.waiting) and self.waiting.first.arrival_s < first.arrival_s
            if goes_first(first.num_uncomputed_tokens, budget, earlier and bool(self._first_due())):
                self._tables.find_again(self.received.pop())
                budget -= self._start(step, first, budget)
            else:
                self._reserve(self.waiting.first)
                budget -= self._let_in(step, budget)
        self.admit(step, budget)

    def admit(self, step: Schedule, budget: int) -> None:
        """Lets waiting sequences in, in order, as far as blocks, seats and token budget go."""
        while self.waiting:
            seq = self.waiting.first
            if not seq.receive and (self.received or not self._has_seats(seq)):
                return
            if not seq.receive and budget <= 0:
                return self._admit_receiving_behind(seq, step)
            if not self._reserve(seq):
                self._short = seq
                return
            budget -= self._let_in(step, budget)

    def _let_in(self, step: Schedule, budget: int) -> int:
        """The first in the queue, which has its blocks now -> tokens that it takes of `budget`."""
        seq = self.waiting.pop()
        seq.admitted_s = seq.admitted_s or time.monotonic()
        if not seq.receive:
            return self._start(step, seq, budget)
        self._admit_receiving(seq, step)
        return 0

    def _admit_receiving_behind(self, first: Sequence, step: Schedule) -> None:
        """`first` waits for tokens alone. Lets those in, in order, whose KV is to come, as far as it leaves blocks."""
        for seq in [one for one in self.waiting if one.receive]:
            if not self._reserve(seq, num_kept=self._need(first).num_blocks):
                return
            self.waiting.remove(seq)
            seq.admitted_s = seq.admitted_s or time.monotonic()
            self._admit_receiving(seq, step)

    def _admit_receiving(self, seq: Sequence, step: Schedule) -> None:
        if seq.num_cacheable_blocks > seq.num_named_blocks:
            seq.status = Status.RECEIVING
            step.admitted.append(seq)
        else:  # its blocks have come into the cache meanwhile
            seq.receive = False
            self.received.insert(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child runs on by itself from where the parent stands, sharing all blocks.

        A parent that has lost its blocks has none to share: its child is computed anew, as it will be itself.
        """
        child.token_ids = list(parent.token_ids)
        child.arrival_s, child.admitted_s = parent.arrival_s, parent.admitted_s
        child.priority, child.num_overtaken = parent.priority, parent.num_overtaken
        child.parent = None
        child.tells_first = False
        if parent.status is not Status.RUNNING or parent.num_uncomputed_tokens:
            child.num_preemptions = 1
            self.waiting.insert(child)
            self.backlog.entered(child)
            return
        self._tables.share(parent, child)
        child.status = Status.RUNNING
        self.running.append(child)
        self.running.sort(key=order)

    def computed(self, row: Scheduled) -> None:
        """Books what a step computed for one row: its tokens, and names for the blocks that it filled."""
        row.sequence.num_computed_tokens += row.num_tokens
        self._tables.name_full(row.sequence)

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
        deepest = max((seq.num_computed_tokens for seq in self.running if seq.num_uncomputed_tokens > 1), default=0)
        fit = self.times.prompt_tokens_within(self.limits.max_step_ms, decoding, deepest)
        if fit is None:
            return 32
        if (wait_ms := self.limits.max_prompt_wait_ms) is not None:
            fit = max(fit, self.times.prompt_tokens_per_step(self.backlog.num_tokens, wait_ms))
        return max(fit, 16)

    def _add_row(self, step: Schedule, seq: Sequence, budget: int) -> int:
        count = min(seq.num_uncomputed_tokens, budget, self.limits.long_prefill_token_threshold or budget)
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
        self.running.sort(key=order)
        return self._add_row(step, seq, budget)

    @property
    def _num_free_for_newcomers(self) -> int:
        return self.pool.num_available - (int(self.pool.num_blocks * WATERMARK) if self.running else 0)

    def _need(self, seq: Sequence) -> Need:
        return self._tables.need(seq, self._num_tokens_to_reserve(seq))

    def _reserve(self, seq: Sequence, num_kept: int = 0) -> bool:
        """Takes cached and fresh blocks for all due tokens of `seq`; False and nothing taken when there are too few
        beside `num_kept`."""
        need = self._need(seq)
        if need.num_blocks + num_kept > self._num_free_for_newcomers:
            return False
        self._tables.reserve(seq, need)
        return True

    def _make_room_for_growth(self, step: Schedule) -> None:
        """Gives every running sequence the block that its next token goes into, at the expense of the last in order.

        A half-filled block that branches share is copied for the one that is to write into it.
        """
        for seq in list(self.running):
            while seq.status is Status.RUNNING and (short := self._tables.lacks(seq)):
                if not self.pool.num_available:
                    self._preempt(step, self._victim())
                elif short == "new":
                    self._tables.grow(seq)
                else:
                    step.copies.append(self._tables.copy_on_write(seq))
                    self._num_copied_blocks += 1

    def _num_tokens_to_reserve(self, seq: Sequence) -> int:
        """Its tokens; for one that must not be preempted again, with all that it may still produce."""
        if not self._is_settled(seq) or seq.sampling is None:
            return seq.num_tokens
        longest = min(self.limits.max_model_len or 2**31, self.pool.num_blocks * seq.block_size)
        return max(seq.num_tokens, min(seq.num_prompt_tokens + seq.sampling.max_tokens, longest))

    def _is_settled(self, seq: Sequence) -> bool:
        most = self.limits.max_num_preemptions
        return most is not None and seq.group is None and seq.num_preemptions >= most

    def _victim(self) -> Sequence:
        return next((seq for seq in reversed(self.running) if not self._is_settled(seq)), self.running[-1])

    def _preempt(self, step: Schedule, seq: Sequence) -> None:
        """Gives all blocks back; the sequence will be computed again, as if nothing had happened."""
        step.copies[:] = [copy for copy in step.copies if copy.target not in seq.block_table]
        self.running.remove(seq)
        seq.num_preemptions += 1
        seq.num_recomputed_tokens += seq.num_computed_tokens
        self._num_preemptions += 1
        self._tables.give_back(seq)
        seq.prompt_logprobs.clear()
        seq.status = Status.WAITING
        self.waiting.insert(seq)
        self.backlog.entered(seq)
