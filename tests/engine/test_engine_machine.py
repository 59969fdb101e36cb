"""Runs the engine machine, and shows the cases that it would find by themselves."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from kvferry.common.requests import FinishReason, SamplingParams
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence
from tests.engine.engine_machine import POOL, ROOT, EngineMachine, LimitedMachine, make_engine, make_sequence
from tests.engine.fake_runner import FakeRunner, generate

for machine in (EngineMachine, LimitedMachine):
    machine.TestCase.settings = settings(
        max_examples=100, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestEngineMachine = EngineMachine.TestCase
TestLimitedMachine = LimitedMachine.TestCase


def test_a_failing_step_ends_its_sequences_and_no_others() -> None:
    engine, runner, reports = make_engine()
    engine.submit(make_sequence("a", [1, 2, 3], SamplingParams(max_tokens=2)))
    runner.fail_next = True
    engine.step()
    assert [f.key for r in reports for f in r.failed] == ["a"]
    engine.submit(make_sequence("b", [1, 2, 3], SamplingParams(max_tokens=2)))
    while engine.step():
        pass
    assert [t.token_id for r in reports for t in r.tokens] == generate([1, 2, 3], 2)
    assert reports[-1].tokens[-1].finish_reason is FinishReason.LENGTH
    engine.check()


def test_preemption_leaves_the_tokens_as_they_were() -> None:
    engine, _, reports = make_engine(num_blocks=10)
    prompts = {f"s{i}": [i] * 9 for i in range(3)}
    for key, prompt in prompts.items():
        engine.submit(make_sequence(key, prompt, SamplingParams(max_tokens=12)))
    while engine.step():
        pass
    assert sum(r.stats.num_preemptions for r in reports) > 0
    for key, prompt in prompts.items():
        assert [t.token_id for r in reports for t in r.tokens if t.key == key] == generate(prompt, 12)


def test_branches_share_the_prompt_and_copy_only_what_they_write() -> None:
    """A 1,000-token prompt with 16 tokens to produce: 64 blocks of 16 tokens for one sample, 78 for eight."""
    used = {}
    for n in (1, 8):
        runner, reports = FakeRunner(100, 16), list[StepReport]()
        scheduler = Scheduler(BlockPool(100), SchedulerLimits(16, 2048, 10))
        engine = Engine(runner, scheduler, (), 1600, reports.append)
        seq = Sequence("s0", [7] * 1000, 1000, ROOT, 16, SamplingParams(max_tokens=16))
        for index in range(1, n):
            seq.add_branch(f"s{index}", index)
        engine.submit(seq)
        peak = shared = 0
        while engine.step():
            peak = max(peak, engine.load().accounts.sequence)
            shared = max(shared, engine.pool.num_shared)
        used[n] = peak
        for index in range(n):
            got = [t.token_id for r in reports for t in r.tokens if t.key == f"s{index}"]
            assert got == generate([7] * 1000, 16, 100 * index)
        assert shared == (63 if n > 1 else 0)  # 62 full ones and, until the first write, the half-filled one
        assert sum(report.stats.num_copied_blocks for report in reports) == n - 1
    assert used == {1: 64, 8: 78}


def test_closing_the_first_branch_before_the_prompt_is_computed_leaves_the_others() -> None:
    engine, _, reports = make_engine()
    seq = make_sequence("a", [3] * 9, SamplingParams(max_tokens=3))
    seq.add_branch("b", 1)
    seq.add_branch("c", 2)
    engine.submit(seq)
    engine.close("a")
    while engine.step():
        pass
    got = {key: [t.token_id for r in reports for t in r.tokens if t.key == key] for key in "abc"}
    assert got == {"a": [], "b": generate([3] * 9, 3, 100), "c": generate([3] * 9, 3, 200)}
    engine.check()
    assert engine.load().accounts.available == POOL
