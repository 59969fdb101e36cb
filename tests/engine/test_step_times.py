"""What a node measures of its steps: what a prompt token takes as such, and what for each position before it."""

from __future__ import annotations

import random

import pytest

from kvferry.common.nodes import num_positions
from kvferry.services.engine.step_times import StepTimes

TOKEN_MS, POSITION_MS = 0.08, 2.6e-5


def took_ms(start: int, count: int) -> float:
    return TOKEN_MS * count + POSITION_MS * num_positions(start, start + count)


def compute(times: StepTimes, num_tokens: int, rng: random.Random, chunk: int = 2048) -> None:
    for start in range(0, num_tokens, chunk):
        count = min(chunk, num_tokens - start)
        noise = rng.uniform(0.9, 1.1)
        times.note(count, 0, took_ms(start, count) * noise, num_positions(start, start + count))


def test_prompts_tell_what_a_token_takes_and_what_a_position() -> None:
    times, rng = StepTimes(), random.Random(1)
    for num_tokens in (900, 12_000, 3_000, 30_000):
        compute(times, num_tokens, rng)
    assert times.prompt_token_ms == pytest.approx(TOKEN_MS, rel=0.3)
    assert times.prompt_position_ms == pytest.approx(POSITION_MS, rel=0.1)


def test_many_short_prompts_do_not_make_a_node_forget_what_long_ones_take() -> None:
    times, rng = StepTimes(), random.Random(1)
    compute(times, 60_000, rng)
    for _ in range(500):
        compute(times, rng.randrange(200, 1000), rng)
    assert times.prompt_position_ms == pytest.approx(POSITION_MS, rel=0.15)
    recent = times.prefill_tokens_per_s
    assert recent == pytest.approx(1000 / (TOKEN_MS + POSITION_MS * 500), rel=0.1), "the mean rate does follow the load"
    expected = 1000 / (TOKEN_MS + POSITION_MS * times.prompt_depth)
    assert recent == pytest.approx(expected, rel=0.05), "and so does the depth that it was measured at"


def test_steps_that_are_all_alike_tell_nothing_of_positions() -> None:
    times = StepTimes()
    for _ in range(5):
        times.note(64, 0, 10.0, num_positions(0, 64))
    assert (times.prompt_token_ms, times.prompt_position_ms) == (pytest.approx(10.0 / 64), 0.0)


@pytest.mark.parametrize("position", [0, 5_000, 100_000])
def test_a_step_holds_as_many_tokens_as_its_time_has_room_for_at_any_depth(position: int) -> None:
    times = StepTimes()
    assert times.prompt_tokens_within(100.0, decoding=False, position=position) is None, "nothing measured yet"
    for num_tokens in (900, 60_000):
        for start in range(0, num_tokens, 2048):
            count = min(2048, num_tokens - start)
            times.note(count, 0, took_ms(start, count), num_positions(start, start + count))
    count = times.prompt_tokens_within(100.0, decoding=False, position=position)
    assert count is not None
    assert took_ms(position, count) == pytest.approx(100.0, rel=0.05)
    times.note(0, 4, 30.0)
    beside = times.prompt_tokens_within(100.0, decoding=True, position=position)
    assert beside is not None
    assert took_ms(position, beside) == pytest.approx(70.0, rel=0.05)
    assert times.prompt_tokens_within(20.0, decoding=True, position=position) == 0


def test_steps_with_lent_cores_make_no_step_too_long_when_these_are_taken_back() -> None:
    times = StepTimes()
    times.note(50, 0, 50.0, num_threads=2)
    assert times.prompt_tokens_within(100.0, decoding=False) == 100
    times.note(50, 0, 100.0, num_threads=1)
    for _ in range(100):
        times.note(0, 4, 10.0, num_threads=2)
        times.note(50, 0, 50.0, num_threads=2)
    assert times.prompt_tokens_within(100.0, decoding=False) == 50
    assert times.prefill_tokens_per_s == pytest.approx(1000.0), "what is told of a node is what it does now"
