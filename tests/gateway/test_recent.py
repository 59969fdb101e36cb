"""The memory of requests that have ended, and the figures of the last minutes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvferry.common.requests import RequestTimes
from kvferry.services.gateway.recent import NUM_REMEMBERED, SLOT_S, WINDOW_S, Recent, RecentRequest

REQUEST = RecentRequest(
    request_id="r",
    kind="chat",
    ended_at=0.0,
    prompt_tokens=100,
    cached_tokens=64,
    output_tokens=3,
    decode="d0",
    prefill="p0",
    num_attempts=1,
    times=RequestTimes(),
    first_token_s=0.1,
    total_s=0.2,
    ended="stop",
    is_error=False,
)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_it_remembers_the_newest_ones_alone_and_counts_all(clock: Clock) -> None:
    recent = Recent(clock)
    for number in range(NUM_REMEMBERED + 7):
        recent.ended(replace(REQUEST, request_id=str(number)))
    assert [request.request_id for request in recent.requests] == [str(n) for n in range(7, NUM_REMEMBERED + 7)]
    assert recent.num_ended == NUM_REMEMBERED + 7


def test_quantiles_are_those_of_the_values_to_five_percent(clock: Clock) -> None:
    recent, draw = Recent(clock), random.Random(5)
    gaps = [draw.lognormvariate(-4, 1) for _ in range(5000)]
    for gap_s in gaps:
        recent.tokens(1, gap_s)
        clock.now += 0.01
    shown = recent.stats().inter_token
    for share, value in ((0.50, shown.p50), (0.95, shown.p95), (0.99, shown.p99)):
        exact = sorted(gaps)[round(share * len(gaps)) - 1]
        assert value == pytest.approx(exact, rel=0.055)
        assert value >= exact * 0.995


def test_what_is_older_than_the_window_counts_no_more(clock: Clock) -> None:
    recent = Recent(clock)
    recent.first_token(8.0)
    recent.ended(replace(REQUEST, is_error=True))
    clock.now += WINDOW_S / 2
    recent.first_token(0.2)
    recent.ended(REQUEST)
    both = recent.stats()
    assert (both.num_requests, both.num_errors, both.prompt_tokens, both.cached_tokens) == (2, 1, 200, 128)
    assert both.first_token.p99 == pytest.approx(8.0, rel=0.055)
    clock.now += WINDOW_S / 2
    later = recent.stats()
    assert (later.num_requests, later.num_errors, later.prompt_tokens, later.cached_tokens) == (1, 0, 100, 64)
    assert later.first_token.p99 == pytest.approx(0.2, rel=0.055)
    clock.now += WINDOW_S
    nothing = recent.stats()
    assert nothing.num_requests == 0
    assert (nothing.first_token.p50, nothing.inter_token.p50, nothing.tokens_per_s) == (None, None, 0.0)


def test_it_stays_small_however_long_it_runs(clock: Clock) -> None:
    recent = Recent(clock)
    for _ in range(1000):
        recent.tokens(1, random.Random(1).expovariate(10))
        clock.now += SLOT_S
    assert len(recent._slots) == WINDOW_S / SLOT_S


def test_tokens_per_second_are_those_of_the_last_seconds(clock: Clock) -> None:
    recent = Recent(clock)
    for _ in range(400):
        clock.now += 0.1
        recent.tokens(5, None)
    assert recent.stats().tokens_per_s == pytest.approx(50, rel=0.05)
    clock.now += 3 * SLOT_S
    assert recent.stats().tokens_per_s == 0


def test_zero_and_negative_gaps_are_counted_too(clock: Clock) -> None:
    recent = Recent(clock)
    recent.tokens(1, 0.0)
    recent.tokens(1, -1.0)
    assert recent.stats().inter_token.p99 == pytest.approx(1e-5)
