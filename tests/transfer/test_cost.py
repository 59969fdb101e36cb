"""Moving or computing: the rule by example, and what it knows of each peer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.services.transfer.cost import HAND_OVER_S, START_BYTES_PER_S, START_TOKENS_PER_S, Bandwidth, estimate

BLOCK_BYTES, BLOCK_SIZE = 737_280, 16  # SmolLM2 in float32


def test_a_long_prefix_is_moved_over_a_fast_link_and_computed_beside_a_slow_one() -> None:
    fast = estimate(60, BLOCK_BYTES, BLOCK_SIZE, 1e9, 500.0)
    assert fast.moving_is_cheaper
    assert (round(fast.move_s - HAND_OVER_S, 3), fast.compute_s) == (0.044, 1.92)
    assert not estimate(60, BLOCK_BYTES, BLOCK_SIZE, 1e9, 500_000.0).moving_is_cheaper
    assert not estimate(60, BLOCK_BYTES, BLOCK_SIZE, 1e7, 500.0).moving_is_cheaper


def test_what_is_computed_sooner_than_asked_for_is_not_moved() -> None:
    assert not estimate(1, 1, BLOCK_SIZE, 1e12, BLOCK_SIZE / HAND_OVER_S).moving_is_cheaper


def test_a_node_that_has_measured_nothing_assumes_a_usual_rate() -> None:
    assert estimate(3, 1, BLOCK_SIZE, 1e9, 0.0) == estimate(3, 1, BLOCK_SIZE, 1e9, START_TOKENS_PER_S)


@given(st.integers(1, 4000), st.floats(1e6, 1e11), st.floats(10, 1e6))
def test_more_bandwidth_never_speaks_against_moving_and_a_faster_engine_never_for_it(
    num_blocks: int, bytes_per_s: float, tokens_per_s: float
) -> None:
    moves = estimate(num_blocks, BLOCK_BYTES, BLOCK_SIZE, bytes_per_s, tokens_per_s).moving_is_cheaper
    assert not moves or estimate(num_blocks, BLOCK_BYTES, BLOCK_SIZE, 2 * bytes_per_s, tokens_per_s).moving_is_cheaper
    assert moves or not estimate(num_blocks, BLOCK_BYTES, BLOCK_SIZE, bytes_per_s, 2 * tokens_per_s).moving_is_cheaper


def test_a_peers_rate_follows_what_is_measured_and_is_forgotten_after_a_minute() -> None:
    now = 0.0
    bandwidth = Bandwidth(clock=lambda: now)
    assert bandwidth.of("a") == START_BYTES_PER_S
    bandwidth.note("a", 1000, 1.0)
    assert bandwidth.of("a") == 1000
    for _ in range(20):
        bandwidth.note("a", 9000, 1.0)
    assert 8900 < bandwidth.of("a") < 9000
    now = 59.0
    assert bandwidth.of("a") > 8900
    bandwidth.note("b", 10, 1.0)
    bandwidth.forget("b")
    assert bandwidth.slowest > 8900
    now = 61.0
    assert bandwidth.of("a") == START_BYTES_PER_S, "a link that was slow once would never be tried again"


def test_an_unknown_peer_is_taken_for_the_slowest_known_one() -> None:
    bandwidth = Bandwidth(clock=lambda: 0.0)
    bandwidth.note("a", 7000, 1.0)
    bandwidth.note("b", 3000, 1.0)
    assert bandwidth.of("c") == 3000
