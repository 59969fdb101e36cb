"""Cached blocks are pulled from any node by any other: who waits for whom, and what happens when a holder fails.

On the virtual clock, between the real services.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from kvferry.common.config import Config, NodeConfig
from kvferry.common.fail_points import spoilt
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.node.cached_pull import promising
from tests.engine.fake_runner import generate
from tests.transfer import sim
from tests.transfer.fleet import NUM_OUTPUT, Fleet, chat, next_turn, num_held
from tests.transfer.sim import BLOCK, SimNode


@pytest.fixture
def fleets() -> Iterator[list[Fleet]]:
    """Those that the test adds are closed. Every copy waits until the test lets it be made."""
    sim.COPIES_WAIT = True
    made: list[Fleet] = []
    yield made
    for fleet in made:
        fleet.close()
    sim.COPIES_WAIT = False


def test_nodes_that_pull_from_each_other_with_full_pools_never_wait_in_a_circle(fleets: list[Fleet]) -> None:
    """Each decode node asks one prefill node for the next turn of its own chat, and the other one for the other's.

    So each prefill node pulls from both, also from the one that waits for it; and all lack blocks for a third prompt.
    """
    num_pulled = num_lacking = 0
    for seed in range(24):
        rng = random.Random(seed)
        fleets.append(fleet := Fleet(2, 2, rng.randint(22, 34)))
        chats = [chat(10 * seed + i, 21) for i in range(2)]
        for i, prompt in enumerate(chats):
            fleet.answer(f"first-{i}", prompt, fleet.d[i], by=fleet.p[i])
        turns = [next_turn(prompt, seed + i, 13) for i, prompt in enumerate(chats)]
        for other, (prompt, turn) in enumerate(zip(chats, turns, strict=True)):
            i = 1 - other
            holders = tuple(node.holder(num_held(prompt)) for node in (fleet.d[other], fleet.d[i], fleet.p[other]))
            fleet.submit(f"next-{other}", turn, fleet.d[i], by=fleet.p[i], holders=holders)
            fleet.submit(f"own-{i}", next_turn(chats[i], 77, 13), fleet.d[i], by=fleet.p[other])
            fleet.submit(f"rival-{i}", chat(1000 + seed + i, 30), fleet.d[i], by=fleet.p[other])
        for _ in range(400):
            fleet.go_on(copy=rng.random() < 0.4, step=rng.random() < 0.4, deliver=rng.random() < 0.6)
            num_lacking += any(node.engine.scheduler.lacks_blocks and node.leases.num_open for node in fleet.d)
            if len(fleet.ended) == 8:
                break
        for other, turn in enumerate(turns):
            assert fleet.got.get(f"next-{other}") == generate(turn, NUM_OUTPUT), f"seed {seed}: {fleet.ended}"
        assert not fleet.loop.now, "a wait had to end before they moved on"
        fleet.go_on(5)
        fleet.check_clean()
        num_pulled += sum(node.num_cached_pulls for node in fleet.nodes)
    assert num_pulled > 48, "hardly anybody pulled: this tests nothing"
    assert num_lacking > 24, "hardly anybody gave blocks while it lacked some: this tests nothing"


PROMPT = chat(1, 45)
"""With its answer twelve full blocks."""
HELD = num_held(PROMPT)
TURN = next_turn(PROMPT, 2, 7)


def cause(node: SimNode, code: str) -> float:
    return node.metrics.transfer_failures.labels(code)._value.get()


@pytest.fixture
def fleet(fleets: list[Fleet]) -> Fleet:
    """d0 has had a turn of a chat, computed by p0. d1, d2 and p1 know nothing of it."""
    fleets.append(made := Fleet(2, 3, 40))
    made.answer("first", PROMPT, made.d[0], by=made.p[0])
    return made


def pulling(fleet: Fleet, *holders: SimNode) -> None:
    """d1 has asked for the blocks, they are pinned for it, and its copies wait to be made."""
    fleet.submit("next", TURN, fleet.d[1], holders=tuple(node.holder(HELD) for node in holders))
    while not len(fleet.d[1].jobs):
        fleet.go_on(copy=False)
    assert holders[0].leases.counts().num_cached_pins == HELD


def test_a_decode_node_pulls_what_another_one_holds_and_computes_the_rest(fleet: Fleet) -> None:
    first = fleet.answer("next", TURN, fleet.d[1], holders=(fleet.d[0].holder(HELD),))
    assert (first.cached_tokens, first.computed_tokens) == (HELD * BLOCK, len(TURN) - HELD * BLOCK)
    assert first.prefilled_by == ""
    fleet.go_on(3)
    fleet.check_clean()


def test_a_prefill_node_pulls_the_answer_from_the_decode_node_that_asked_it(fleet: Fleet) -> None:
    turn = next_turn(PROMPT, 2, 30)
    first = fleet.answer("next", turn, fleet.d[0], by=fleet.p[0])
    assert first.cached_tokens == HELD * BLOCK
    assert first.prefilled_by == fleet.p[0].instance
    assert fleet.p[0].num_cached_pulls == 1
    fleet.go_on(3)
    fleet.check_clean()


def test_a_prefill_node_that_pulls_all_it_shall_hand_over_computes_nothing(fleet: Fleet) -> None:
    p1, d1 = fleet.p[1], fleet.d[1]
    d1.service._node.config = Config(node=NodeConfig(cached_pull="never", local_prefill_max_tokens=BLOCK))
    first = fleet.answer("again", PROMPT, d1, by=p1, holders=(fleet.d[0].holder(HELD),))
    assert first.prefilled_by == p1.instance
    assert first.computed_tokens == len(PROMPT) - (len(PROMPT) - 1) // BLOCK * BLOCK
    assert p1.runner.num_tokens == 0
    fleet.go_on(3)
    fleet.check_clean()


def test_a_hint_that_lies_costs_a_question_and_no_link(fleet: Fleet) -> None:
    d2, d1 = fleet.d[2], fleet.d[1]
    first = fleet.answer("next", TURN, d1, holders=(d2.holder(HELD), fleet.d[0].holder(HELD)))
    assert first.cached_tokens == HELD * BLOCK, "the next holder was not asked"
    assert cause(d1, "blocks_gone") == 1
    assert len(d1._puller.links) == 2
    fleet.go_on(3)
    fleet.check_clean()


@pytest.mark.parametrize("others", [0, 1])
def test_a_holder_that_has_evicted_some_blocks_gives_the_others(fleet: Fleet, others: int) -> None:
    d0, d1, d2 = fleet.d
    fleet.answer("elsewhere", PROMPT, d2, holders=(d0.holder(HELD),))
    d0.pool.release(d0.pool.allocate(d0.pool.num_available - 5))
    holders = tuple(node.holder(HELD) for node in (d0, d2)[: 1 + others])
    first = fleet.answer("next", TURN, d1, holders=holders)
    assert first.cached_tokens == (HELD if others else 5) * BLOCK
    assert d1.num_cached_pulls == 1 + others
    fleet.go_on(3)
    fleet.check_clean()


def test_blocks_under_another_salt_are_not_given(fleet: Fleet) -> None:
    first = fleet.answer("next", TURN, fleet.d[1], holders=(fleet.d[0].holder(HELD),), salt="theirs")
    assert first.cached_tokens == 0
    assert cause(fleet.d[1], "blocks_gone") == 1


def test_a_decode_node_computes_no_prompt_for_others(fleet: Fleet) -> None:
    first = fleet.answer("stray", chat(5, 30), fleet.d[1], by=fleet.d[0])
    assert first.computed_tokens == 30
    assert cause(fleet.d[1], "unavailable") == 1


@pytest.mark.parametrize("half_open", [False, True])
@pytest.mark.parametrize("others", [0, 1])
def test_a_holder_that_dies_while_it_is_pulled_from_is_left_for_the_next_one(
    fleet: Fleet, half_open: bool, others: int
) -> None:
    d0, d1, d2 = fleet.d
    fleet.answer("elsewhere", PROMPT, d2, holders=(d0.holder(HELD),))
    pulling(fleet, *(d0, d2)[: 1 + others])
    fleet.wire.crash(d0.instance, half_open=half_open)
    for _ in range(14 if half_open else 0):  # silence of three seconds
        fleet.go_on()
        fleet.loop.advance(0.25)
    first = fleet.finish("next", TURN)
    assert first.cached_tokens == others * HELD * BLOCK
    assert cause(d1, "unavailable") == 1
    fleet.go_on(3)
    fleet.check_clean()


def test_peers_may_pin_a_share_of_the_cache_and_no_more(fleets: list[Fleet]) -> None:
    fleets.append(fleet := Fleet(1, 2, 40, share=(HELD - 1) / 40))
    fleet.answer("first", PROMPT, fleet.d[0], by=fleet.p[0])
    first = fleet.answer("next", TURN, fleet.d[1], holders=(fleet.d[0].holder(HELD),))
    assert first.cached_tokens == 0
    assert cause(fleet.d[1], "overloaded") == 1
    fleet.go_on(3)
    fleet.check_clean()


def test_leases_of_cached_blocks_give_way_to_a_request_that_waits_for_blocks(fleet: Fleet) -> None:
    d0, d1, _ = fleet.d
    pulling(fleet, d0)
    rival = chat(9, BLOCK * (d0.pool.num_blocks - HELD // 2))
    fleet.submit("rival", rival, d0)
    fleet.go_on(2, copy=False)
    assert d0.num_revoked == 1
    assert d0.engine.load().num_running == 1, "the leases still keep the rival out"
    first = fleet.finish("next", TURN)
    assert first.cached_tokens == 0, "blocks were used though their lease had ended"
    assert cause(d1, "lease_expired") == 1
    fleet.finish("rival", rival)
    fleet.go_on(3)
    fleet.check_clean()


def test_a_node_that_lacks_blocks_gives_only_what_is_in_use_anyway(fleet: Fleet) -> None:
    d0 = fleet.d[0]
    block_ids = d0.pool.allocate(d0.pool.num_available - HELD - 1)
    fleet.submit("waits", chat(9, BLOCK * (HELD + 3)), d0)
    fleet.go_on(2)
    assert d0.engine.load().num_waiting == 1
    first = fleet.answer("next", TURN, fleet.d[1], holders=(d0.holder(HELD),))
    assert first.cached_tokens == 0
    assert cause(fleet.d[1], "blocks_gone") == 1
    d0.pool.release(block_ids)
    fleet.go_on(30)
    fleet.check_clean()


def test_wrong_bytes_are_dropped_and_computed(fleets: list[Fleet]) -> None:
    fleets.append(fleet := Fleet(1, 2, 40, "grpc"))
    fleet.answer("first", PROMPT, fleet.d[0], by=fleet.p[0])
    fleet.submit("next", TURN, fleet.d[1], holders=(fleet.d[0].holder(HELD),))
    while not (lanes := [lane for call, lane in fleet.wire.lanes("Read") if lane is call.down]):
        fleet.go_on()
    flying = lanes[0].in_flight
    run = pb.BlockData.FromString(flying[0][1])
    flying[0] = ("message", pb.BlockData(data=spoilt(run.data), checksums=run.checksums).SerializeToString())
    first = fleet.finish("next", TURN)
    assert first.cached_tokens == 0
    assert cause(fleet.d[1], "block_corrupt") == 1
    assert fleet.d[1].sample("transport_failures_total", transport="grpc", cause="block_corrupt") == 1
    fleet.go_on(3)
    fleet.check_clean()


@pytest.mark.parametrize("rounds", range(12))
def test_a_request_that_is_cancelled_while_its_prefill_node_pulls_leaves_nothing(fleet: Fleet, rounds: int) -> None:
    d0 = fleet.d[0]
    fleet.submit("next", next_turn(PROMPT, 2, 30), d0, by=fleet.p[1])
    fleet.go_on(rounds, copy=rounds % 2 == 0)

    def cancel() -> None:
        if request := d0.service._requests.get((d0.session.number, "next", 0)):
            d0.service._cancel(request, [0])

    d0.call(cancel)
    fleet.go_on(8)
    fleet.check_clean()


def test_a_prefill_nodes_cancels_count_until_the_copy_under_way_has_ended(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0 + fleet.loop.now)
    d0, p1 = fleet.d[0], fleet.p[1]
    fleet.submit("next", next_turn(PROMPT, 2, 30), d0, by=p1)
    while not len(p1.jobs):
        fleet.go_on(copy=False)
    p1.call(p1.jobs.begin)
    request = d0.service._requests[d0.session.number, "next", 0]
    d0.call(d0.service._cancel, request, [0])
    fleet.go_on(2, copy=False)
    fleet.loop.advance(0.5)
    assert p1.sample("cancel_to_free_seconds_count") == 0
    fleet.go_on(2)
    assert p1.sample("cancel_to_free_seconds_sum") == 0.5
    fleet.go_on(6)
    fleet.check_clean()


def test_a_pull_of_cached_blocks_is_hidden_behind_nothing_and_counted_so(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 1000.0 + fleet.loop.now)
    d0, d1, _ = fleet.d
    pulling(fleet, d0)
    d1.call(d1.jobs.begin)
    fleet.loop.advance(0.5)
    fleet.finish("next", TURN)
    assert d1.num_cached_pulls == 1
    assert d1.sample("transfer_seconds_sum", transport="shm") == 0.5
    assert d1.sample("transfer_exposed_seconds_total") == 0.5
    fleet.go_on(3)
    fleet.check_clean()


def test_auto_moves_only_what_is_cheaper_to_move(fleet: Fleet) -> None:
    d0, d1, _ = fleet.d
    context, bandwidth = d1.service._node, d1._puller.bandwidth
    context.config = Config(node=NodeConfig(cached_pull="auto"))
    d1.engine.scheduler.times.note(10_000, 0, 10_000.0)  # computing what d0 holds: 48 ms
    bandwidth.note(d0.instance, 1_000, 1.0)
    assert promising(context, (d0.holder(HELD),), 0, HELD) == []
    assert d1.metrics.cached_pulls.labels("computing_is_cheaper")._value.get() == 1
    for _ in range(30):
        bandwidth.note(d0.instance, 10_000_000, 1.0)
    assert promising(context, (d0.holder(HELD),), 0, HELD) == [d0.holder(HELD)]
    assert promising(context, (d0.holder(HELD),), HELD - 1, HELD) == [], "one block is computed sooner than asked for"


def test_nobody_is_asked_for_what_is_here_or_when_pulling_is_off(fleet: Fleet) -> None:
    d0, d1, d2 = fleet.d
    context = d1.service._node
    holders = (d2.holder(3), d1.holder(9), d0.holder(20))
    assert promising(context, holders, 0, 8) == [d0.holder(8), d2.holder(3)]
    assert promising(context, holders, 3, 8) == [d0.holder(8)]
    assert promising(context, holders, 8, 8) == []
    context.config = Config(node=NodeConfig(cached_pull="never"))
    assert promising(context, holders, 0, 8) == []
