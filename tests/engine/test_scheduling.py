"""Who runs when: order, bounds, and that nobody starves. With a runner that computes nothing."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.common.errors import BadRequest, Overloaded
from kvferry.common.nodes import num_positions
from kvferry.common.requests import SamplingParams
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.step_times import StepTimes
from kvferry.services.engine.waiting import MAX_OVERTAKEN
from tests.engine.engine_machine import BLOCK, EngineMachine, make_engine, make_sequence
from tests.engine.fake_runner import FakeRunner, generate


def submit(engine: Engine, key: str, num_prompt: int, num_new: int = 1, priority: int = 0, **options: Any) -> None:
    prompt = [sum(map(ord, key)) % 40] * num_prompt
    seq = make_sequence(key, prompt, SamplingParams(max_tokens=num_new), **options)
    seq.priority = priority
    engine.submit(seq)


def run(engine: Engine, reports: list[StepReport]) -> list[str]:
    """All steps until nothing is left -> keys in the order in which they ended."""
    while engine.step():
        pass
    engine.check()
    return [token.key for report in reports for token in report.tokens if token.finish_reason is not None]


def test_first_come_is_first_served_and_a_priority_is_refused_there() -> None:
    engine, _, reports = make_engine(max_num_seqs=1)
    for key in "cab":
        submit(engine, key, 5)
    with pytest.raises(BadRequest, match="fcfs") as caught:
        submit(engine, "d", 5, priority=1)
    assert caught.value.param == "priority"
    assert run(engine, reports) == ["c", "a", "b"]


def test_a_lower_priority_runs_earlier_and_ties_go_by_arrival() -> None:
    engine, _, reports = make_engine(max_num_seqs=1, policy="priority")
    for key, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -3), ("e", 0)):
        submit(engine, key, 5, priority=priority)
    assert run(engine, reports) == ["d", "b", "e", "a", "c"]


def test_the_victim_is_the_least_important_one_and_of_those_the_newest() -> None:
    engine, _, reports = make_engine(num_blocks=13, policy="priority")
    priorities = {"a": 5, "b": 0, "c": 5}
    for key, priority in priorities.items():
        submit(engine, key, 9, 12, priority)
    sequences = dict(engine._sequences)
    ended = run(engine, reports)
    assert [sequences[key].num_preemptions for key in "ab"] == [0, 0]
    assert sequences["c"].num_preemptions > 0
    assert ended[-1] == "c"
    for key in priorities:
        got = [token.token_id for report in reports for token in report.tokens if token.key == key]
        assert got == generate(sequences[key].token_ids[:9], 12)


def test_nobody_is_overtaken_more_often_than_the_bound() -> None:
    engine, _, reports = make_engine(max_num_seqs=1, policy="priority")
    submit(engine, "first", 5, 3)
    engine.step()
    submit(engine, "patient", 5, priority=9)
    for i in range(MAX_OVERTAKEN * 2):  # more important ones never stop coming
        submit(engine, f"n{i}", 5)
        engine.step()
    ended = run(engine, reports)
    assert ended.index("patient") <= MAX_OVERTAKEN + 1
    assert ended.index("patient") > MAX_OVERTAKEN / 2, "it was not overtaken: the priority did nothing"


def test_a_big_prompt_at_the_head_is_passed_by_no_small_one() -> None:
    engine, _, reports = make_engine(num_blocks=12, max_num_batched_tokens=64)
    submit(engine, "running", 4 * BLOCK, 9)
    engine.step()
    submit(engine, "big", 10 * BLOCK)
    for i in range(20):
        submit(engine, f"small{i}", 3)
    ended = run(engine, reports)
    assert ended[:2] == ["running", "big"]
    assert len(ended) == 22


def test_a_received_prompt_with_many_branches_is_not_kept_from_its_seats_by_small_ones() -> None:
    engine, _, reports = make_engine(max_num_seqs=4)
    wide = make_sequence("wide", [1] * 9, SamplingParams(max_tokens=2), receive=True)
    for index in (1, 2, 3):
        wide.add_branch(f"wide{index}", index)
    for i in range(2):
        submit(engine, f"before{i}", 3, 4)
    engine.step()
    engine.submit(wide)
    engine.receive_ended("wide", 0)
    for i in range(10):
        submit(engine, f"after{i}", 3, 4)
    ended = run(engine, reports)
    assert set(ended[:6]) == {"before0", "before1", "wide", "wide1", "wide2", "wide3"}


def test_a_long_prompt_leaves_room_in_each_step_for_short_ones() -> None:
    """Without the threshold the short one would wait for four steps of the long one."""
    engine, _, reports = make_engine(long_prefill_token_threshold=8, max_num_batched_tokens=16)
    submit(engine, "long", 60)
    engine.step()
    submit(engine, "short", 5)
    engine.step()
    assert [token.key for token in reports[-1].tokens] == ["short"]
    assert reports[-1].stats.num_prompt_tokens == 8 + 5
    assert run(engine, reports) == ["short", "long"]


def test_the_queue_is_bounded_in_tokens_but_one_prompt_may_always_wait() -> None:
    engine, _, reports = make_engine(max_num_seqs=1, max_num_waiting_tokens=30)
    submit(engine, "running", 4, 3)
    engine.step()
    submit(engine, "larger-than-the-bound", 50)
    with pytest.raises(Overloaded, match="50"):
        submit(engine, "one-more", 1)
    assert run(engine, reports) == ["running", "larger-than-the-bound"]
    for i in range(6):
        submit(engine, f"s{i}", 5)
    with pytest.raises(Overloaded, match="30"):
        submit(engine, "s6", 5)
    assert run(engine, reports)[2:] == [f"s{i}" for i in range(6)]


def test_a_prompt_that_waits_behind_one_with_its_beginning_counts_for_the_rest_alone() -> None:
    """Four tokens to a block: the second shares three blocks with the first, which is to compute them."""
    engine, _, reports = make_engine(max_num_seqs=1)
    params = SamplingParams(max_tokens=1)
    seqs = [make_sequence(key, tokens, params) for key, tokens in (("a", [*range(14)]), ("b", [*range(12), 40, 41]))]
    for seq in seqs:
        engine.num_cached_tokens(seq)  # asked for each request, before it is submitted
        engine.submit(seq)
    load = engine.load()
    assert load.num_waiting_tokens == 14 + 2
    assert load.num_waiting_positions == num_positions(0, 14) + num_positions(12, 14)
    engine.submit(make_sequence("c", [50] * 9, params))
    assert engine.load().num_waiting_tokens == 14 + 2 + 9
    run(engine, reports)
    assert (engine.load().num_waiting_tokens, engine.load().num_waiting_positions) == (0, 0)
    again = make_sequence("d", [*range(14)], params)
    engine.num_cached_tokens(again)
    engine.submit(again)
    assert engine.load().num_waiting_tokens == 2, "what is cached is not computed again"


def test_what_was_received_finds_what_has_been_computed_while_it_waited() -> None:
    """Two turns of a conversation, five blocks and six: the second one receives a block and waits for the only seat."""
    engine, runner, reports = make_engine(max_num_seqs=1)
    turn, params = [*range(22)], SamplingParams(max_tokens=2)
    engine.submit(make_sequence("first", turn[:21], params))
    engine.submit(make_sequence("second", [*turn, 40, 41, 42], params, receive=True))
    (admitted,) = reports[-1].admitted
    assert len(admitted.block_ids) == 6
    engine.step()
    runner.fill(admitted.block_ids[:1], turn[:4], 0)
    engine.receive_ended("second", 1)
    run(engine, reports)
    _, facts = [token.first for report in reports for token in report.tokens if token.first]
    assert (facts.received_tokens, facts.cached_tokens, facts.computed_tokens) == (4, 16, 5)


def test_beams_that_wait_for_others_without_room_give_theirs_back() -> None:
    """Received prompts own the pool: two beams run, two cannot start, and none has anything to compute."""
    machine = EngineMachine()
    machine.submit_beam_search(prefix=0, shared=4, width=4, new=2)
    for shared in (5, 21, 25):
        machine.submit_receiving(prefix=0, shared=shared, own=0, n=1)
    machine.submit_receiving(prefix=0, shared=9, own=0, n=4)
    machine.submit_receiving(prefix=0, shared=5, own=0, n=1)
    machine.submit(prefix=0, shared=0, own=0, new=1, n=1)
    machine.teardown()


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_sequence_is_preempted_at_most_so_often_and_then_runs_to_its_end(most: int) -> None:
    engine, _, reports = make_engine(num_blocks=12, max_num_seqs=8, max_num_preemptions=most)
    for i in range(8):
        submit(engine, f"s{i}", 5, 30)
    sequences = dict(engine._sequences)
    assert len(run(engine, reports)) == 8
    counts = [seq.num_preemptions for seq in sequences.values()]
    assert max(counts) <= most
    assert sum(counts) > 0
    for key, seq in sequences.items():
        got = [token.token_id for report in reports for token in report.tokens if token.key == key]
        assert got == generate(seq.token_ids[:5], 30)


@pytest.mark.parametrize(
    ("num_waiting", "limits", "expected"),
    [
        (40, {}, 40),
        (40, {"max_step_ms": 30.0}, 20),  # 10 ms for the streams, 1 ms for each token
        (40, {"max_step_ms": 30.0, "max_prompt_wait_ms": 400.0}, 20),
        (300, {"max_step_ms": 30.0, "max_prompt_wait_ms": 400.0}, 30),  # 10 steps, whose streams take the other 100 ms
        (300, {"max_step_ms": 30.0}, 20),
        (500, {"max_step_ms": 30.0, "max_prompt_wait_ms": 400.0}, 500),
    ],
)
def test_prompts_beside_streams_get_what_a_step_has_room_for_or_what_their_wait_demands(
    num_waiting: int, limits: dict[str, float], expected: int
) -> None:
    engine, _, _ = make_engine(max_num_batched_tokens=1000, num_blocks=1000, **limits)
    submit(engine, "stream", 4, 50)
    engine.step()
    scheduler = engine.scheduler
    scheduler.times = StepTimes()
    for _ in range(50):
        scheduler.times.note(0, 1, 10.0)
        scheduler.times.note(100, 1, 110.0)
    submit(engine, "prompt", num_waiting)
    rows = {row.sequence.key: row.num_tokens for row in scheduler.schedule().rows}
    assert rows == {"stream": 1, "prompt": expected}


def steps_until(engine: Engine, reports: list[StepReport], key: str) -> int:
    """Steps until this sequence has had a token; `long` must not have ended by then."""
    for num_steps in range(1, 50):
        engine.step()
        told = {token.key for token in reports[-1].tokens}
        assert "long" not in told, f"{key} waited for all of the long prompt"
        if key in told:
            return num_steps
    raise AssertionError(f"{key} never had a token")


def receive(engine: Engine, reports: list[StepReport], runner: FakeRunner, key: str, prompt: list[int]) -> None:
    """A receive that brings all full blocks before the last token."""
    engine.submit(make_sequence(key, prompt, SamplingParams(max_tokens=3), receive=True))
    (admitted,) = reports[-1].admitted
    runner.fill(admitted.block_ids, prompt, admitted.first_block)
    engine.receive_ended(key, admitted.first_block + len(admitted.block_ids))


def receive_some(
    engine: Engine,
    reports: list[StepReport],
    runner: FakeRunner,
    key: str,
    prompt: list[int],
    num_blocks: int,
    behind: tuple[str, int] | None = None,
) -> None:
    """A receive that brings the first `num_blocks` blocks; `behind`: whom, though it has its own blocks first."""
    seq = make_sequence(key, prompt, SamplingParams(max_tokens=1), receive=True)
    engine.submit(seq)
    (admitted,) = reports[-1].admitted
    if behind is not None:
        submit(engine, *behind)
        (waiting,) = engine.scheduler.waiting
        waiting.arrival_s = seq.arrival_s - 1.0
    runner.fill(admitted.block_ids[:num_blocks], prompt, 0)
    engine.receive_ended(key, num_blocks)


@pytest.mark.parametrize("limits", [{}, {"max_step_ms": 30.0}, {"long_prefill_token_threshold": 12}])
def test_what_was_received_starts_beside_a_long_prompt(limits: dict[str, Any]) -> None:
    engine, runner, reports = make_engine(num_blocks=200, **limits)
    submit(engine, "stream", 4, 60)
    engine.step()
    submit(engine, "long", 400)
    engine.step()
    for i in range(3):
        receive(engine, reports, runner, f"r{i}", [i] * 11)
    assert steps_until(engine, reports, "r2") <= 3


def test_a_short_prompt_at_the_head_starts_beside_a_long_one_and_the_long_one_keeps_half() -> None:
    engine, _, reports = make_engine(num_blocks=200)
    submit(engine, "long", 400)
    engine.step()
    (long,) = engine.scheduler.running
    for i in range(6):
        submit(engine, f"s{i}", 8, num_new=1)
    computed = long.num_computed_tokens
    for i in range(6):
        assert steps_until(engine, reports, f"s{i}") == 1
    assert long.num_computed_tokens == computed + 6 * 8
    engine.step()
    assert long.num_computed_tokens == computed + 6 * 8 + 16, "with nobody behind it, a step is all its own"


def test_a_long_prompt_leaves_nothing_to_one_that_half_a_step_does_not_finish() -> None:
    """Of two alike, one after the other is sooner done than both side by side."""
    engine, _, reports = make_engine(num_blocks=200)
    for key in ("long", "as-long"):
        submit(engine, key, 9 * 16)
    for _ in range(9):
        assert [token.key for report in reports for token in report.tokens] == []
        engine.step()
    assert [token.key for token in reports[-1].tokens] == ["long"]


def test_a_long_prompt_leaves_nothing_to_a_short_one_without_blocks_or_seats() -> None:
    for num_blocks, max_num_seqs in ((24, 6), (200, 1)):
        engine, _, _ = make_engine(num_blocks=num_blocks, max_num_seqs=max_num_seqs)
        submit(engine, "long", 23 * BLOCK)
        engine.step()
        submit(engine, "short", 5)
        assert [row.num_tokens for row in engine.scheduler.schedule().rows] == [16]


def test_what_is_to_be_received_gets_blocks_while_the_head_waits_for_tokens_alone() -> None:
    engine, runner, reports = make_engine(num_blocks=40)
    submit(engine, "long", 20 * BLOCK)
    engine.step()
    submit(engine, "head", 12 * BLOCK)
    receive(engine, reports, runner, "r", [1] * 11)
    assert steps_until(engine, reports, "r") == 1
    reports.clear()
    engine.submit(make_sequence("too-large-beside-the-head", [2] * 40, SamplingParams(max_tokens=3), receive=True))
    engine.step()
    assert not any(report.admitted for report in reports)
    while not any(report.admitted for report in reports):
        assert engine.step()
    assert "head" in {seq.key for seq in engine.scheduler.running}, "what was to be received took the head's blocks"


def test_a_long_rest_of_what_was_received_passes_nobody_who_came_before_it() -> None:
    """A prefill node: blocks of the last one's beginning have been pulled while the two before it wait for tokens."""
    engine, runner, reports = make_engine(num_blocks=200)
    for key in ("running", "first", "second"):
        submit(engine, key, 10 * BLOCK)
        engine.step()
    receive_some(engine, reports, runner, "pulled", [1] * (100 * BLOCK), 2)
    assert run(engine, reports) == ["running", "first", "second", "pulled"]


def test_what_was_received_begins_where_who_came_before_it_finds_no_blocks() -> None:
    engine, runner, reports = make_engine(num_blocks=40)
    submit(engine, "running", 10 * BLOCK)
    engine.step()
    receive_some(engine, reports, runner, "pulled", [1] * (8 * BLOCK), 1, behind=("large", 25 * BLOCK))
    assert run(engine, reports) == ["running", "pulled", "large"]
