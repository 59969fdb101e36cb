"""A node that fails is left alone for longer and longer, and gets one request at a time until it works again."""

from __future__ import annotations

from kvferry.services.gateway.breaker import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FAILURES, PROBE_S, Breakers
from tests.gateway.test_nodes import Clock


def test_failures_in_a_row_open_it_and_output_in_between_does_not_let_them() -> None:
    breakers = Breakers(Clock())
    for _ in range(MAX_FAILURES - 1):
        breakers.failed("a")
    breakers.worked("a")
    for _ in range(MAX_FAILURES - 1):
        breakers.failed("a")
    assert breakers.avoided() == frozenset()
    assert breakers.views()["a"].state == "closed"
    breakers.failed("a")
    assert breakers.avoided() == {"a"}
    assert breakers.views()["a"].state == "open"


def test_after_the_pause_one_request_at_a_time_goes_there() -> None:
    clock = Clock()
    breakers = Breakers(clock)
    breakers.failed("a", lost=True)
    clock.now += FIRST_PAUSE_S
    assert breakers.views()["a"].state == "half_open"
    assert breakers.avoided() == frozenset()
    breakers.sent("a")
    assert breakers.avoided() == {"a"}
    breakers.worked("a")
    assert breakers.avoided() == frozenset()
    assert breakers.views() == {}


def test_a_probe_that_fails_doubles_the_pause_up_to_the_longest() -> None:
    clock, opened = Clock(), []
    breakers = Breakers(clock, lambda: opened.append(1))
    pause_s = FIRST_PAUSE_S
    breakers.failed("a", lost=True)
    for number in range(1, 10):
        assert len(opened) == number
        assert breakers.views()["a"].retry_in_s == pause_s
        clock.now += pause_s * 0.99
        assert breakers.avoided() == {"a"}
        clock.now += pause_s * 0.02
        breakers.sent("a")
        breakers.failed("a")
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert pause_s == LONGEST_PAUSE_S


def test_requests_that_fail_together_count_as_one_failure() -> None:
    clock = Clock()
    breakers = Breakers(clock)
    for _ in range(50):
        breakers.failed("a", lost=True)
    clock.now += FIRST_PAUSE_S
    assert breakers.avoided() == frozenset()


def test_a_probe_whose_client_left_does_not_keep_the_node_out_for_ever() -> None:
    clock = Clock()
    breakers = Breakers(clock)
    breakers.failed("a", lost=True)
    clock.now += FIRST_PAUSE_S
    breakers.sent("a")
    clock.now += PROBE_S
    assert breakers.avoided() == frozenset()


def test_a_node_that_is_gone_is_forgotten() -> None:
    breakers = Breakers(Clock())
    breakers.failed("a", lost=True)
    breakers.failed("b", lost=True)
    breakers.forget_all_but(["b"])
    assert breakers.avoided() == {"b"}
