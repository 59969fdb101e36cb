"""The paged engine: a scheduler, a block pool and a runner under one mutex.

Knows nothing of roles, requests, peers or the network. A sequence *enters* by `submit` (to be computed here) or with
`receive` set (a peer's blocks are copied in first), and *leaves* by its last token, or, compute-only, by being held
until somebody has taken its blocks and calls `close`.

Threads: `step` is called by one thread, everything else by any. The mutex is held for bookkeeping only, never while
the runner computes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Protocol

from kvferry.common.errors import Internal
from kvferry.common.nodes import NodeLoad, num_positions
from kvferry.common.requests import FinishReason, TokenLogprobs
from kvferry.services.engine.beam_groups import BeamGroups
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.outputs import (
    AdmittedOutput,
    BlocksOutput,
    FailedOutput,
    FirstToken,
    StepReport,
    StepStats,
    TokenOutput,
)
from kvferry.services.engine.sampler import SampledToken
from kvferry.services.engine.schedule import RunnerLost, Schedule
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence as Seq
from kvferry.services.engine.sequence import Status


class Runner(Protocol):
    """Computes one step. Implementations: `TorchRunner`; `FakeRunner` in the tests."""

    @property
    def num_threads(self) -> int:
        """With how many the last step ended."""

    def execute(self, schedule: Schedule) -> list[SampledToken]:
        """One token for each row that samples, each followed by one for each of its branches, in row order.

        The copies are made first; the rows' KV is in the pool afterwards, and log-probabilities of the rows' prompt
        tokens that are wanted are with their sequences. Raises RunnerLost when later steps would fail, too.
        """


class Engine:
    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        eos_token_ids: Iterable[int],
        max_model_len: int,
        on_report: Callable[[StepReport], None],
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.pool: BlockPool = scheduler.pool
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len
        self.num_steps = 0
        self.step_ms = 0.0
        self.num_recomputed_tokens = 0
        self._on_report = on_report
        self._mutex = threading.Lock()
        self._work = threading.Condition(self._mutex)
        self._woken = False
        self._sequences: dict[str, Seq] = {}
        self._computing: frozenset[str] = frozenset()
        self._closing: set[str] = set()
        self._cancel_to_free_s: list[float] = []  # not reported yet
        self._last_check_s = 0.0
        self._beams = BeamGroups(scheduler, self._sequences, self._drop)

    # ---- any thread

    def submit(self, seq: Seq) -> None:
        """Queues a sequence. Raises PromptExceedsPool or Overloaded; then nothing was taken."""
        with self._mutex:
            assert seq.key not in self._sequences, f"sequence {seq.key} submitted twice"
            self.scheduler.add(seq)
            for one in (seq, *seq.branches):
                self._sequences[one.key] = one
            if seq.group is not None:
                self._beams.add(seq.group)
            step = Schedule()
            self.scheduler.admit(step, budget=0)
            self._wake()
        if step.admitted:
            self._on_report(StepReport(admitted=[AdmittedOutput.of(seq) for seq in step.admitted]))

    def close(self, key: str, *, cancelled_s: float = 0.0) -> None:
        """Ends a sequence at whatever stage and gives its blocks back, after the running step at the latest.

        Idempotent; an unknown key is ignored. No output follows. A receiving sequence without branches may only
        be closed when nothing writes into its blocks any more. `cancelled_s`: the `time.monotonic` at which whoever
        waited for it left; a report tells how long after that its blocks were back.
        """
        with self._mutex:
            if (group := self._beams.of(key)) is not None:
                doomed = self._beams.close(group, key)
            else:
                doomed = [self._sequences[key]] if key in self._sequences else []
            for seq in doomed:
                seq.cancelled_s = cancelled_s or seq.cancelled_s
                if (seq.parent or seq).key in self._computing:
                    self._closing.add(seq.key)
                else:
                    self._end(seq)
            self._wake()

    def receive_ended(self, key: str, num_received_blocks: int) -> None:
        """Nothing writes into this receiving sequence any more; its first blocks hold their KV, the rest is due."""
        with self._mutex:
            if (seq := self._sequences.get(key)) is not None and seq.status is Status.RECEIVING:
                seq.received_s = time.monotonic()
                self.scheduler.receive_ended(seq, num_received_blocks)
                self._wake()

    def num_cached_tokens(self, seq: Seq) -> int:
        """Leading tokens of a sequence, not submitted yet, that a cache hit would supply now."""
        with self._mutex:
            if not self.pool.enable_prefix_caching:
                return 0
            return len(self.pool.lookup(seq.name_blocks(seq.num_cacheable_blocks))) * seq.block_size

    def pin_cached(self, names: Sequence[bytes]) -> list[int]:
        """Pins the longest leading run of these blocks that the pool holds; their ids.

        While somebody waits for blocks, only such that are in use anyway.
        """
        with self._mutex:
            block_ids = self.pool.lookup(names)
            if self.scheduler.lacks_blocks:
                block_ids = list(takewhile(lambda i: not self.pool.num_idle((i,)), block_ids))
            self.pool.pin(block_ids)
            return block_ids

    def leases_block_admission(self) -> bool:
        """Whether somebody waits for blocks while nothing but leases keeps some."""
        with self._mutex:
            return self.scheduler.lacks_blocks and self.pool.accounts().lease > 0

    def pin(self, block_ids: Sequence[int]) -> None:
        with self._mutex:
            self.pool.pin(block_ids)

    def unpin(self, block_ids: Sequence[int]) -> None:
        with self._mutex:
            self.pool.unpin(block_ids)
            self._wake()

    @property
    def num_waiting_tokens(self) -> int:
        with self._mutex:
            return self.scheduler.backlog.num_tokens

    def load(self) -> NodeLoad:
        """A report of this instant; `num_leases` is the service's to fill in."""
        with self._mutex:
            sched, waiting = self.scheduler, self.scheduler.backlog.walk()
            return NodeLoad(
                num_running=len(sched.running),
                num_waiting=len(self._sequences) - len(sched.running),
                num_waiting_tokens=sum(end - start for start, end in waiting),
                num_waiting_positions=sum(num_positions(start, end) for start, end in waiting),
                num_blocks=self.pool.num_blocks,
                accounts=self.pool.accounts(),
                prefill_tokens_per_s=round(sched.times.prefill_tokens_per_s, 1),
                prompt_token_ms=float(f"{sched.times.prompt_token_ms:.4g}"),
                prompt_position_ms=float(f"{sched.times.prompt_position_ms:.4g}"),
                prompt_depth=round(sched.times.prompt_depth, 1),
                step_ms=round(self.step_ms, 2),
                num_steps=self.num_steps,
                num_shared_blocks=self.pool.num_shared,
            )

    def held_names(self) -> list[bytes]:
        with self._mutex:
            return self.pool.held_names()

    def check(self) -> None:
        """Raises AssertionError where the block account does not balance."""
        with self._mutex:
            self.pool.check()

    def wait_for_work(self, timeout_s: float) -> None:
        """Returns when something was submitted, closed or received, or after `timeout_s`."""
        with self._work:
            if not self._woken:
                self._work.wait(timeout_s)

    # ---- the engine's thread

    def step(self) -> bool:
        """Schedules, computes, books. False when there was nothing to compute. Raises RunnerLost, after which the
        engine is of no use."""
        with self._mutex:
            self._woken = False
            schedule = self.scheduler.schedule()
            self._computing = frozenset(row.sequence.key for row in schedule.rows)
            if not schedule.rows:
                self._check_when_idle()
        started, sampled, failure = time.monotonic(), list[SampledToken](), None
        if schedule.rows:
            try:
                sampled = self.runner.execute(schedule)
            except RunnerLost:  # failing every batch from now on would be worse than ending
                raise
            except Exception as exc:  # the batch is lost, the engine is not
                failure = Internal(f"the engine failed in a step: {type(exc).__name__}: {exc}")
                failure.__cause__ = exc
        with self._mutex:
            report = self._book(schedule, sampled, failure, time.monotonic() - started)
        if report:
            self._on_report(report)
        return bool(schedule.rows)

    def _book(
        self, schedule: Schedule, sampled: list[SampledToken], failure: Internal | None, took_s: float
    ) -> StepReport:
        self._computing = frozenset()
        report = StepReport(  # what was closed while the step ran is not mentioned any more
            admitted=[AdmittedOutput.of(seq) for seq in schedule.admitted if seq.status is Status.RECEIVING],
            blocks=[BlocksOutput.of(seq, complete=True) for seq in schedule.held if seq.status is Status.HELD],
            stats=self._note_step(schedule, took_s),
        )
        tokens = iter(sampled)
        for row in schedule.rows:
            seq = row.sequence
            ones = [seq, *seq.branches]
            drawn = [next(tokens) for _ in ones] if row.samples and failure is None else []
            if seq.status is Status.CLOSED:  # a beam whose search ended with an earlier row
                continue
            if failure is not None:
                self._book_failure(ones, failure, report)
                continue
            self.scheduler.computed(row)
            if seq.sampling is None:
                self._book_blocks(seq, report)
            elif drawn and seq.group is not None:
                if seq.key not in self._closing and row.start + row.num_tokens == seq.num_tokens:
                    self._beams.book(seq, drawn[0], FirstToken.of(seq), report)
            elif drawn:
                self._book_tokens(ones, drawn, report)
        for key in self._closing & self._sequences.keys():
            self._end(self._sequences[key])
        self._closing.clear()
        report.cancel_to_free_s.extend(self._cancel_to_free_s)
        self._cancel_to_free_s.clear()
        changes = self.pool.take_changes()
        report.changes.stored.extend(changes.stored)
        report.changes.removed.extend(changes.removed)
        return report

    def _book_failure(self, ones: list[Seq], failure: Internal, report: StepReport) -> None:
        if (group := ones[0].group) is not None:
            report.failed.extend(FailedOutput(key, failure) for key in group.keys if key not in group.closed)
            self._beams.drop_all(group)
        else:
            report.failed.extend(FailedOutput(one.key, failure) for one in ones if one.key not in self._closing)
            if ones[0].sampling is None:  # what it has reported may be about to be pinned: it keeps that until closed
                self.scheduler.hold(ones[0])
            else:
                self._drop(ones[0])

    def _book_blocks(self, seq: Seq, report: StepReport) -> None:
        if complete := seq.num_uncomputed_tokens == 0:
            self.scheduler.hold(seq)
        if seq.key not in self._closing:
            report.blocks.append(BlocksOutput.of(seq, complete))

    def _book_tokens(self, ones: list[Seq], drawn: list[SampledToken], report: StepReport) -> None:
        """Births the branches of a prompt that is computed, then gives each sequence its token, or all that it had."""
        for branch in ones[1:]:
            self.scheduler.fork(ones[0], branch)
        ones[0].branches = []
        for one, token in zip(ones, drawn, strict=True):
            if one.abandoned:
                self._drop(one)
            if one.abandoned or one.key in self._closing:
                continue
            if one.resumed_token_ids:
                one.token_ids.extend(one.resumed_token_ids)
                one.resumed_token_ids = ()
                continue
            if token.error is not None:
                report.failed.append(FailedOutput(one.key, token.error))
                self._drop(one)
                continue
            one.token_ids.append(token.token_id)
            first = FirstToken.of(ones[0]) if ones[0].tells_first else None
            ones[0].tells_first = False
            reason, stop = self._finish(one, token.token_id)
            logprobs = None if token.logprob is None else TokenLogprobs(token.logprob, token.top)
            report.tokens.append(TokenOutput(one.key, token.token_id, logprobs, reason, stop, first))
            if reason is not None:
                self._drop(one)

    def _finish(self, seq: Seq, token_id: int) -> tuple[FinishReason | None, int | None]:
        params = seq.sampling
        assert params is not None
        if token_id in params.stop_token_ids:
            return FinishReason.STOP, token_id
        if token_id in self.eos_token_ids and not (params.ignore_eos and seq.matcher is None):
            return FinishReason.STOP, None
        if seq.matcher is not None and seq.matcher.is_complete(seq.token_ids[seq.num_prompt_tokens :]):
            return FinishReason.STOP, None
        if seq.num_output_tokens >= params.max_tokens or seq.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH, None
        return None, None

    def _end(self, seq: Seq) -> None:
        """Closes one sequence. One whose branches wait for its prompt computes that first, for them."""
        if seq.branches:
            seq.abandoned, seq.cancelled_s = True, 0.0
        elif (parent := seq.parent) is not None:
            parent.branches.remove(seq)
            del self._sequences[seq.key]
            if parent.abandoned and not parent.branches:
                parent.cancelled_s = seq.cancelled_s
                if parent.status is not Status.RECEIVING:
                    self._drop(parent)
        else:
            if seq.group is not None:
                self._beams.forget(seq.group)
            self._drop(seq)

    def _drop(self, seq: Seq) -> None:
        """Takes a sequence out with all that hangs on it, and gives its blocks back."""
        self.num_recomputed_tokens += seq.num_recomputed_tokens
        self.scheduler.drop(seq)
        if seq.cancelled_s:
            self._cancel_to_free_s.append(time.monotonic() - seq.cancelled_s)
        for one in (seq, *seq.branches):
            del self._sequences[one.key]

    def _note_step(self, schedule: Schedule, took_s: float) -> StepStats:
        if not schedule.rows:
            return StepStats()
        num_prompt = schedule.num_prompt_tokens
        num_decodes = schedule.num_tokens - num_prompt
        self.scheduler.times.note(
            num_prompt, num_decodes, took_s * 1e3, schedule.num_prompt_positions, self.runner.num_threads
        )
        self.num_steps += 1
        self.step_ms += (0.2 if self.step_ms else 1.0) * (took_s * 1e3 - self.step_ms)
        preemptions, copied = self.scheduler.take_counts()
        return StepStats(num_prompt, num_decodes, preemptions, copied, took_s)

    def _wake(self) -> None:
        self._woken = True
        self._work.notify()

    def _check_when_idle(self) -> None:
        now = time.monotonic()
        if not self._sequences and now - self._last_check_s > 1.0:
            self._last_check_s = now
            self.pool.check()
