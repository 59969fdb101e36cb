"""The router never picks a node that cannot work, and more load or fewer cached blocks never make a node better."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.common.errors import ContextTooLong, Draining, Unavailable
from kvferry.common.nodes import BlockAccounts, NodeLoad, NodeRecord, NodeState, Role, num_positions
from kvferry.common.requests import Holder
from kvferry.services.gateway.plan import InFlight, Plan, RouteRequest
from kvferry.services.gateway.router import choose
from tests.gateway.fake_decode import CARD


def node(name: str, role: Role = Role.BOTH, state: NodeState = NodeState.READY, **load: float) -> NodeRecord:
    return NodeRecord(
        instance_id=f"i-{name}",
        node_id=name,
        role=role,
        address=f"{name}:1",
        model="tiny",
        card=CARD,
        max_model_len=2**17,
        state=state,
        load=NodeLoad(**load),  # type: ignore[arg-type]
    )


loads = st.builds(
    NodeLoad,
    num_running=st.integers(0, 64),
    num_waiting=st.integers(0, 64),
    num_waiting_tokens=st.integers(0, 20_000),
    num_waiting_positions=st.integers(0, 10**8),
    prefill_tokens_per_s=st.sampled_from([0.0, 500.0, 2000.0, 50_000.0]),
    prompt_token_ms=st.sampled_from([0.0, 0.02, 0.5, 2.0]),
    prompt_position_ms=st.sampled_from([0.0, 1e-5, 1e-3]),
    prompt_depth=st.sampled_from([0.0, 200.0, 5000.0]),
    step_ms=st.sampled_from([0.0, 10.0, 80.0]),
    num_blocks=st.sampled_from([0, 100, 4000]),
    accounts=st.builds(BlockAccounts, free=st.sampled_from([0, 2, 80, 3000])),
    pull_bytes_per_s=st.sampled_from([0.0, 1e6, 1e10]),
)
cards = st.sampled_from([CARD, replace(CARD, numerics_id="other")])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[RouteRequest, list[NodeRecord], dict[str, int]]:
    nodes = [
        replace(
            node(f"n{number}", draw(st.sampled_from(Role)), draw(st.sampled_from(NodeState))),
            load=draw(loads),
            card=draw(cards),
            max_model_len=draw(st.sampled_from([2**17, 2**17, 2**17, 2000])),
        )
        for number in range(draw(st.integers(1, 6)))
    ]
    matches = {n.instance_id: draw(st.integers(0, 40)) for n in nodes if draw(st.booleans())}
    flights = st.builds(
        InFlight,
        num_requests=st.integers(0, 64),
        num_prompt_tokens=st.integers(0, 20_000),
        num_positions=st.integers(0, 10**8),
    )
    mine = {n.instance_id: draw(flights) for n in nodes if draw(st.booleans())}
    coming = {n.instance_id: draw(st.integers(0, 40)) for n in nodes if draw(st.integers(0, 3)) == 0}
    excluded = frozenset(n.instance_id for n in nodes if draw(st.integers(0, 5)) == 0)
    tokens = draw(st.integers(1, 4000))
    request = RouteRequest(draw(st.text("abc", max_size=4)), tokens, mine, excluded, coming=coming)
    weight = draw(st.sampled_from([0.0, 1.0, 4.0]))
    return replace(request, stream_delay_weight=weight), nodes, matches


def plan_of(request: RouteRequest, nodes: list[NodeRecord], matches: dict[str, int]) -> Plan:
    try:
        return choose(request, nodes, matches)
    except (Unavailable, ContextTooLong):
        assume(False)
        raise


def can_hold(node: NodeRecord, request: RouteRequest) -> bool:
    return request.num_tokens + (node.role is not Role.PREFILL) <= node.max_model_len


@given(clusters())
def test_only_nodes_that_are_ready_and_of_the_right_role_and_can_hold_the_prompt(
    cluster: tuple[RouteRequest, list[NodeRecord], dict[str, int]],
) -> None:
    request, nodes, matches = cluster
    decode = [n for n in nodes if n.role is not Role.PREFILL]
    ready = {
        n.instance_id: n
        for n in nodes
        if n.state is NodeState.READY and n.instance_id not in request.excluded and can_hold(n, request)
    }
    can_decode = any(n.role is not Role.PREFILL for n in ready.values())
    try:
        plan = choose(request, nodes, matches)
    except Unavailable:
        assert not can_decode
        assert not decode or any(can_hold(n, request) for n in decode)
        return
    except ContextTooLong:
        assert decode
        assert not any(can_hold(n, request) for n in decode)
        return
    assert can_decode
    assert ready[plan.decode.instance_id].role is not Role.PREFILL
    assert all(ready[candidate.instance_id].role is Role.PREFILL for candidate in plan.prefill)
    assert not plan.prefill or plan.decode.role is Role.DECODE


@given(clusters(), st.randoms())
def test_same_question_same_answer_whatever_the_order_of_nodes(
    cluster: tuple[RouteRequest, list[NodeRecord], dict[str, int]], random: object
) -> None:
    request, nodes, matches = cluster
    plan = plan_of(request, nodes, matches)
    shuffled = list(nodes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = choose(request, shuffled, dict(reversed(matches.items())))
    assert again.decode == plan.decode
    assert again.prefill == plan.prefill


@given(clusters(), st.integers(1, 50), st.integers(0, 5000))
def test_a_node_that_was_not_chosen_is_not_chosen_with_more_load(
    cluster: tuple[RouteRequest, list[NodeRecord], dict[str, int]], requests: int, tokens: int
) -> None:
    request, nodes, matches = cluster
    plan = plan_of(request, nodes, matches)
    for at, other in enumerate(nodes):
        if other.role is Role.PREFILL or other == plan.decode:
            continue
        load = replace(
            other.load,
            num_running=other.load.num_running + requests,
            num_waiting_tokens=other.load.num_waiting_tokens + tokens,
        )
        busier = [*nodes[:at], replace(other, load=load), *nodes[at + 1 :]]
        assert choose(request, busier, matches).decode.instance_id == plan.decode.instance_id


@given(st.lists(loads, min_size=2, max_size=5), st.integers(1, 4000), st.data())
def test_a_prefill_node_that_was_not_first_is_not_first_with_more_load(
    prefill_loads: list[NodeLoad], tokens: int, data: st.DataObject
) -> None:
    prefill = [replace(node(f"p{n}", Role.PREFILL), load=load) for n, load in enumerate(prefill_loads)]
    nodes = [node("d", Role.DECODE), *prefill]
    matches = {n.instance_id: data.draw(st.integers(0, 40)) for n in nodes}
    first, *others = choose(RouteRequest("r", tokens), nodes, matches).prefill_candidates
    name = data.draw(st.sampled_from(others)).instance_id
    other = next(n for n in prefill if n.instance_id == name)
    load = replace(
        other.load,
        num_running=other.load.num_running + data.draw(st.integers(0, 50)),
        num_waiting_tokens=other.load.num_waiting_tokens + data.draw(st.integers(0, 5000)),
        accounts=BlockAccounts(free=data.draw(st.integers(0, other.load.accounts.free))),
    )
    busier = [replace(n, load=load) if n is other else n for n in nodes]
    assert choose(RouteRequest("r", tokens), busier, matches).prefill_candidates[0].instance_id == first.instance_id


@given(clusters(), st.integers(1, 40))
def test_the_chosen_node_stays_chosen_with_more_cached(
    cluster: tuple[RouteRequest, list[NodeRecord], dict[str, int]], blocks: int
) -> None:
    """Of what is here: what a node will have, it has only once its queue has passed."""
    request, nodes, matches = cluster
    request = replace(request, coming={})
    plan = plan_of(request, nodes, matches)
    chosen = plan.decode.instance_id
    more = matches | {chosen: matches.get(chosen, 0) + blocks}
    assert choose(request, nodes, more).decode.instance_id == chosen


@given(st.lists(loads, min_size=2, max_size=5), st.integers(1, 4000), st.data())
def test_the_first_prefill_candidate_stays_first_with_more_cached(
    prefill_loads: list[NodeLoad], tokens: int, data: st.DataObject
) -> None:
    prefill = [replace(node(f"p{n}", Role.PREFILL), load=load) for n, load in enumerate(prefill_loads)]
    nodes = [node("d", Role.DECODE), *prefill]
    matches = {n.instance_id: data.draw(st.integers(0, 40)) for n in nodes}
    first = choose(RouteRequest("r", tokens), nodes, matches).prefill_candidates[0].instance_id
    more = matches | {first: matches[first] + data.draw(st.integers(1, 40))}
    assert choose(RouteRequest("r", tokens), nodes, more).prefill_candidates[0].instance_id == first


def test_a_cached_prefix_attracts() -> None:
    nodes = [node("a"), node("b")]
    for salt in "pqrst":
        assert choose(RouteRequest(salt, 512), nodes, {"i-b": 31}).decode.node_id == "b"


def test_load_outweighs_a_cached_prefix() -> None:
    nodes = [node("a"), node("b", num_running=60, step_ms=30.0)]
    assert choose(RouteRequest("r", 512), nodes, {"i-b": 31}).decode.node_id == "a"


def test_equal_nodes_share_equally() -> None:
    nodes = [node(name) for name in "abcd"]
    chosen = [choose(RouteRequest(f"request-{n}", 100), nodes, {}).decode.node_id for n in range(400)]
    assert all(60 < chosen.count(name) < 140 for name in "abcd")


def test_a_hot_prefix_spreads_when_requests_in_flight_are_counted() -> None:
    """400 requests of one prefix, 64 at a time, 4 nodes: the busiest gets less than twice the mean."""
    nodes = [node(name) for name in "abcd"]
    matches: dict[str, int] = {}
    running: list[str] = []
    served: list[str] = []
    hits = 0
    for number in range(400):
        flights = {name: InFlight(running.count(name)) for name in set(running)}
        chosen = choose(RouteRequest(f"r{number}", 512, flights), nodes, matches).decode.instance_id
        hits += chosen in matches
        matches[chosen] = 32
        served.append(chosen)
        running.append(chosen)
        if len(running) == 64:
            running.pop(0)
    counts = [served.count(n.instance_id) for n in nodes]
    assert max(counts) < 2 * 400 / 4
    assert hits / 400 > 0.8


def test_tokens_deep_in_a_long_prompt_are_a_longer_queue_than_as_many_of_short_ones() -> None:
    pace = {"prompt_token_ms": 0.1, "prompt_position_ms": 1e-5}
    deep = node("deep", Role.PREFILL, num_waiting_tokens=10_000, num_waiting_positions=900_000_000, **pace)
    flat = node("flat", Role.PREFILL, num_waiting_tokens=20_000, num_waiting_positions=10_000_000, **pace)
    plan = choose(RouteRequest("r", 1000), [node("d", Role.DECODE), deep, flat], {})
    assert [c.instance_id for c in plan.prefill_candidates] == ["i-flat", "i-deep"]
    assert [c.cost.queue_ms for c in plan.prefill_candidates] == [pytest.approx(2100), pytest.approx(10_000)]
    assert plan.prefill_candidates[0].cost.compute_ms == pytest.approx(0.1 * 1000 + 1e-5 * 500_000)


def test_who_computes_a_prompts_beginning_gets_its_other_turns_unless_the_queue_is_longer_than_that() -> None:
    near = node("near", Role.PREFILL, num_waiting_tokens=600)
    nodes = [node("d", Role.DECODE), near, node("idle", Role.PREFILL)]
    turn = RouteRequest("r", 4000, coming={"i-near": 240})
    plan = choose(turn, nodes, {})
    assert [c.instance_id for c in plan.prefill] == ["i-near", "i-idle"]
    assert plan.chosen.num_uncached == 4000 - 240 * 16
    assert plan.chosen.matched_blocks == 0, "nobody has them yet"
    assert plan.holders == ()
    long = replace(near, load=replace(near.load, num_waiting_tokens=5000))
    assert choose(turn, [nodes[0], long, nodes[2]], {}).prefill[0].instance_id == "i-idle"


def test_a_measurements_noise_is_not_worth_a_queue_but_a_slow_machine_is() -> None:
    def first(rate: float) -> str:
        other = node("other", Role.PREFILL, prefill_tokens_per_s=1000.0, num_waiting_tokens=100)
        idle = node("idle", Role.PREFILL, prefill_tokens_per_s=rate, prompt_depth=1500.0)
        nodes = [node("d", Role.DECODE), other, idle]
        return choose(RouteRequest("r", 3000), nodes, {}).prefill[0].instance_id

    assert first(900.0) == "i-idle"
    assert first(300.0) == "i-other"


def test_a_node_that_has_seen_no_long_prompt_is_slowed_by_them_like_the_others() -> None:
    known = node("known", Role.PREFILL, prompt_token_ms=0.1, prompt_position_ms=1e-5, num_waiting_tokens=1)
    new = node("new", Role.PREFILL, prompt_token_ms=0.4)
    plan = choose(RouteRequest("r", 50_000), [node("d", Role.DECODE), known, new], {})
    costs = {c.node_id: c.cost.compute_ms for c in plan.prefill_candidates}
    assert costs["new"] == costs["known"] == pytest.approx(0.1 * 50_000 + 1e-5 * num_positions(0, 50_000))


def _measured(name: str, *, told: tuple[float, float], took: float, **load: float) -> NodeRecord:
    """A prefill node that fits its terms as `told`; its prompts of 1,000 tokens took so many ms a token."""
    terms = {"prompt_token_ms": told[0], "prompt_position_ms": told[1]}
    rate = {"prefill_tokens_per_s": 1000.0 / took, "prompt_depth": 500.0}
    return node(name, Role.PREFILL, NodeState.READY, **terms, **rate, **load)


def test_what_a_node_makes_of_a_few_short_prompts_says_nothing_of_a_long_one() -> None:
    """All take 0.1 ms a token and 3e-5 ms a position. One has seen so little that it tells a sixth of the latter."""
    alike = [_measured(name, told=(0.1, 3e-5), took=0.115, num_waiting_tokens=8_000) for name in "abc"]
    misled = _measured("misled", told=(0.1125, 5e-6), took=0.115, num_waiting_tokens=12_000)
    nodes = [node("d", Role.DECODE), *alike, misled]
    plan = choose(RouteRequest("r", 50_000), nodes, {})
    assert plan.prefill_candidates[-1].node_id == "misled", "it has the longest queue"
    assert len({c.cost.compute_ms for c in plan.prefill_candidates}) == 1
    slow = _measured("slow", told=(0.1125, 5e-6), took=0.23)
    costs = {c.node_id: c.cost for c in choose(RouteRequest("r", 50_000), [*nodes, slow], {}).prefill_candidates}
    assert costs["slow"].compute_ms == pytest.approx(2 * costs["a"].compute_ms, rel=0.1), "but of all its prompts"


def test_what_a_pull_saves_is_not_rated_by_the_luckiest_measurement() -> None:
    """6,000 tokens are cached where a short queue is. Pulling them is as good as having them, and saves the queue."""
    alike = [_measured(name, told=(0.1, 3e-5), took=0.115) for name in "ab"]
    lucky = _measured("lucky", told=(0.001, 1e-4), took=0.115)
    warm = _measured("warm", told=(0.1, 3e-5), took=0.115, num_waiting_tokens=1_000)
    plan = choose(RouteRequest("r", 10_000), [node("d", Role.DECODE), *alike, lucky, warm], {"i-warm": 375})
    costs = {c.node_id: c.cost for c in plan.prefill_candidates}
    assert costs["a"].compute_ms == pytest.approx(costs["warm"].compute_ms)
    assert plan.prefill_candidates[-1].node_id == "warm"


def test_prefill_candidates_come_cheapest_first() -> None:
    nodes = [
        node("d", Role.DECODE),
        node("busy", Role.PREFILL, num_waiting_tokens=5000),
        node("warm", Role.PREFILL),
        node("cold", Role.PREFILL),
    ]
    plan = choose(RouteRequest("r", 1000), nodes, {"i-warm": 20})
    assert [c.instance_id for c in plan.prefill] == ["i-warm", "i-cold", "i-busy"]
    assert plan.prefill[0].cached_blocks == 20
    assert plan.prefill[0].address == "warm:1"


def test_a_prefill_node_with_another_layout_is_not_offered() -> None:
    other = replace(node("p", Role.PREFILL), card=replace(CARD, block_size=32))
    same = replace(node("q", Role.PREFILL), card=replace(CARD, version="newer"))
    plan = choose(RouteRequest("r", 1000), [node("d", Role.DECODE), other, same], {})
    assert [c.instance_id for c in plan.prefill] == ["i-q"]


def test_a_prefill_node_that_holds_only_some_of_the_heads_is_neither_asked_nor_named() -> None:
    whole = node("d", Role.DECODE)
    half = replace(node("half", Role.PREFILL), card=replace(CARD, tp_size=2, tp_rank=1))
    plan = choose(RouteRequest("r", 1000), [whole, half], {"i-half": 9})
    assert (plan.prefill, plan.holders) == ((), ())
    plan = choose(RouteRequest("r", 1000), [replace(half, role=Role.DECODE), node("p", Role.PREFILL)], {"i-p": 9})
    assert [c.instance_id for c in plan.prefill] == ["i-p"], "one that holds more serves"
    assert [h.instance_id for h in plan.holders] == ["i-p"]


def test_a_slow_link_is_worth_a_longer_queue() -> None:
    """8 MB of blocks: 8 s by the one node's link, 8 ms by the other's."""
    slow = node("slow", Role.DECODE, pull_bytes_per_s=1e6)
    fast = node("fast", Role.DECODE, pull_bytes_per_s=1e9, num_running=20)
    plan = choose(RouteRequest("r", 16_000), [slow, fast, node("p", Role.PREFILL)], {})
    assert plan.decode.node_id == "fast"
    assert plan.prefill


def test_a_decode_node_computes_alone_where_prefill_is_the_bottleneck() -> None:
    decode = node("d", Role.DECODE)
    free, busy = node("p", Role.PREFILL), node("p", Role.PREFILL, num_waiting_tokens=100_000)
    assert choose(RouteRequest("r", 2000), [decode, free], {}).chosen.computed_by == "i-p"
    plan = choose(RouteRequest("r", 2000), [decode, busy], {})
    assert (plan.chosen.computed_by, plan.prefill) == ("i-d", ())
    crowded = replace(decode, load=replace(decode.load, num_running=600))
    assert choose(RouteRequest("r", 2000), [crowded, busy], {}).prefill, "too many streams would wait for it"


def test_a_full_pool_is_time_to_wait() -> None:
    room = NodeLoad(num_blocks=100, accounts=BlockAccounts(free=80, sequence=20), num_running=8, step_ms=20.0)
    full = replace(room, accounts=BlockAccounts(free=2, sequence=98))
    nodes = [replace(node("full"), load=full), replace(node("room"), load=replace(room, num_running=9))]
    plan = choose(RouteRequest("r", 160), nodes, {})
    assert plan.decode.node_id == "room"
    worse = plan.decode_candidates[1].cost
    assert worse.queue_ms == 8 * 16 / 8 * 20.0, "8 blocks are short, and 8 streams give back one each per 16 steps"


def test_a_full_node_gets_no_better_by_having_more_to_do() -> None:
    """More streams give blocks back sooner; that must not draw yet more of them."""

    def total_ms(num_streams: int) -> float:
        load = NodeLoad(num_blocks=100, accounts=BlockAccounts(free=2), num_running=num_streams, step_ms=20.0)
        return choose(RouteRequest("r", 1584), [replace(node("full"), load=load)], {}).chosen.cost.total_ms

    totals = [total_ms(num_streams) for num_streams in range(0, 64)]
    assert totals == sorted(totals)
    assert totals[0] < totals[-1]


@given(clusters(), st.integers(1, 3000))
def test_no_node_starves(cluster: tuple[RouteRequest, list[NodeRecord], dict[str, int]], tokens: int) -> None:
    """Where nothing ever ends, every node that can work gets something in the end."""
    request, nodes, matches = cluster
    request, nodes = replace(request, num_tokens=tokens), [replace(n, card=CARD) for n in nodes]
    plan_of(request, nodes, matches)
    mine = dict(request.in_flight)
    usable = {
        n.instance_id
        for n in nodes
        if n.state is NodeState.READY and n.instance_id not in request.excluded and can_hold(n, request)
    }
    hungry = {n.instance_id for n in nodes if n.role is not Role.PREFILL} & usable
    if any(n.role is Role.DECODE and n.instance_id in usable for n in nodes):
        hungry |= {n.instance_id for n in nodes if n.role is Role.PREFILL} & usable
    for number in range(60):
        if not hungry:
            return
        plan = choose(replace(request, request_id=f"r{number}", in_flight=mine), nodes, matches)
        decode, by = plan.decode.instance_id, plan.chosen.computed_by
        hungry -= {decode, by}
        old = mine.get(decode, InFlight())
        mine[decode] = replace(old, num_requests=old.num_requests + 100_000)
        old = mine.get(by, InFlight())
        more = num_positions(0, 20_000_000)
        mine[by] = replace(
            old, num_prompt_tokens=old.num_prompt_tokens + 20_000_000, num_positions=old.num_positions + more
        )
    raise AssertionError(f"{hungry} got nothing")


def test_holders_of_any_role_are_named_those_with_most_blocks_first() -> None:
    nodes = [
        node("d", Role.DECODE),
        node("e", Role.DECODE, num_running=50, step_ms=50.0),
        node("p", Role.PREFILL),
        node("b", num_running=50, step_ms=50.0),
        replace(node("strange", Role.PREFILL), card=replace(CARD, block_size=32)),
        node("leaving", state=NodeState.DRAINING),
    ]
    matches = {"i-d": 2, "i-e": 7, "i-p": 3, "i-b": 5, "i-strange": 9, "i-leaving": 9}
    plan = choose(RouteRequest("r", 1000), nodes, matches)
    assert plan.decode.node_id == "d"
    assert plan.holders == (Holder("i-e", "e:1", 7), Holder("i-b", "b:1", 5), Holder("i-p", "p:1", 3))
    assert plan.reasons()["holders"][0] == {"instance_id": "i-e", "address": "e:1", "num_blocks": 7}


def test_nobody_there_is_unavailable_and_everyone_leaving_is_draining() -> None:
    with pytest.raises(Unavailable, match="no decode node is ready"):
        choose(RouteRequest("r", 10), [node("p", Role.PREFILL)], {})
    with pytest.raises(Draining):
        choose(RouteRequest("r", 10), [node("d", state=NodeState.DRAINING)], {})


def test_the_reasons_name_every_candidate_and_their_terms() -> None:
    nodes = [node("d", Role.DECODE), node("e", Role.DECODE, num_running=3), node("p", Role.PREFILL)]
    plan = choose(RouteRequest("r", 100), nodes, {"i-p": 2})
    reasons = plan.reasons()
    assert {c["node_id"] for c in reasons["decode_candidates"]} == {"d", "e"}
    assert reasons["prefill_candidates"][0]["matched_blocks"] == 2
    assert set(reasons["decode_candidates"][0]["cost"]) == {
        "queue_ms",
        "compute_ms",
        "transfer_ms",
        "step_ms",
        "pressure_ms",
    }
    assert plan.compact().startswith("decode=d prefill=p matched=0 cost_ms=")


def test_the_work_of_a_decision_grows_with_the_nodes_not_with_their_pairs() -> None:
    """About 20 ms for 1,024 nodes. Counted in calls, which no busy machine changes."""

    def num_calls(num_pairs: int) -> int:
        nodes = [node(f"{role}{n}", role) for n in range(num_pairs) for role in (Role.DECODE, Role.PREFILL)]
        matches, calls = {n.instance_id: 10 for n in nodes}, itertools.count()
        sys.setprofile(lambda *_: next(calls))
        choose(RouteRequest("r", 2000), nodes, matches)
        sys.setprofile(None)
        return next(calls)

    assert num_calls(256) < 6 * num_calls(64)


def test_a_prompt_goes_to_nodes_whose_context_holds_it_and_an_error_names_the_longest() -> None:
    small, large = (replace(node(name, Role.DECODE), max_model_len=limit) for name, limit in (("s", 500), ("l", 1000)))
    helper = replace(node("p", Role.PREFILL), max_model_len=800)
    nodes = [small, large, helper]
    took = {n: choose(RouteRequest("r", n), nodes, {"i-s": 31}) for n in (499, 500, 800, 801, 999)}
    assert {n: plan.decode.node_id for n, plan in took.items()} == {499: "s", 500: "l", 800: "l", 801: "l", 999: "l"}
    assert {n: [c.instance_id for c in plan.prefill] for n, plan in took.items() if n > 499} == {
        500: ["i-p"],
        800: ["i-p"],
        801: [],
        999: [],
    }
    with pytest.raises(ContextTooLong, match=r"1000 tokens.* 1000$") as caught:
        choose(RouteRequest("r", 1000), nodes, {})
    assert caught.value.param == "prompt"
    with pytest.raises(Unavailable):
        choose(RouteRequest("r", 700, excluded=frozenset(["i-l"])), nodes, {})
