"""The node table and the prefix lookup go on when the index does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from kvferry.common.errors import IndexUnavailable
from kvferry.common.hashing import block_names, root_name
from kvferry.common.nodes import LayoutCard, NodeRecord, Role, num_positions
from kvferry.services.gateway.lookup import INDEX_PAUSE_S, PrefixLookup, prompt_names
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.nodes import MIN_REFRESH_S, REPORT_AGE_S, RETURN_GRACE_S, Ledger, NodeTable
from kvferry.services.gateway.plan import InFlight, RouteRequest
from kvferry.services.gateway.router import choose
from kvferry.services.index.base import Matches, Nodes
from kvferry.services.index.memory import MemoryIndex
from tests.gateway.fake_decode import CARD
from tests.gateway.test_router import node


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FlakyIndex(MemoryIndex):
    """Fails or hangs on demand; counts lookups."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.hangs = False
        self.num_lookups = 0

    async def nodes(self) -> Nodes:
        if self.fails:
            raise IndexUnavailable("gone")
        return await super().nodes()

    async def match(self, names: Sequence[bytes]) -> Matches:
        self.num_lookups += 1
        if self.fails:
            raise IndexUnavailable("gone")
        if self.hangs:
            await asyncio.Event().wait()
        return await super().match(names)


def test_the_last_known_nodes_stay_while_the_index_is_away() -> None:
    async def scenario() -> None:
        clock, index = Clock(), FlakyIndex()
        table = NodeTable(index, "tiny", clock)
        await index.announce(node("a"), 60)
        await table.refresh()
        index.fails = True
        clock.now += 3600
        await table.refresh()
        assert [n.node_id for n in table.nodes] == ["a"]
        assert not table.index_ok
        index.fails = False
        await index.announce(node("b"), 60)
        clock.now += 1
        await table.refresh()
        assert [n.node_id for n in table.nodes] == ["a", "b"]
        assert table.index_ok

    asyncio.run(scenario())


@pytest.mark.parametrize("back", [(), ("b",)], ids=["nobody", "one"])
def test_a_flushed_index_is_not_believed_at_once_whoever_is_back_when_it_is_asked(back: tuple[str, ...]) -> None:
    async def scenario() -> None:
        clock, index = Clock(), MemoryIndex()
        table = NodeTable(index, "tiny", clock)
        for name in ("a", "b"):
            await index.announce(node(name), 60)
        await table.refresh()
        clock.now += 100
        index.flush()
        for name in back:
            await index.announce(node(name), 60)
        for _ in range(int(RETURN_GRACE_S)):
            clock.now += 0.9
            await table.refresh()
            assert [n.node_id for n in table.nodes if n.node_id not in back] == [n for n in "ab" if n not in back]
        clock.now += 2
        await table.refresh()
        assert [n.node_id for n in table.nodes] == list(back)

    asyncio.run(scenario())


def test_a_node_that_leaves_is_gone_at_once_and_so_is_the_last_one() -> None:
    async def scenario() -> None:
        clock, index = Clock(), MemoryIndex()
        table = NodeTable(index, "tiny", clock)
        await index.announce(node("a"), 60)
        await index.announce(node("b"), 60)
        await table.refresh()
        clock.now += 100
        await index.withdraw("i-b")
        await table.refresh()
        assert [n.node_id for n in table.nodes] == ["a"]
        await index.withdraw("i-a")
        clock.now += 2
        await table.refresh()
        assert table.nodes == ()
        clock.now += 1
        await table.refresh()
        assert table.nodes == ()

    asyncio.run(scenario())


def test_nodes_have_time_to_return_to_an_index_that_was_away() -> None:
    async def scenario() -> None:
        clock, index = Clock(), FlakyIndex()
        table = NodeTable(index, "tiny", clock)
        await index.announce(node("a"), 60)
        await index.announce(node("b"), 60)
        await table.refresh()
        index.fails = True
        clock.now += 100
        await table.refresh()
        index.fails = False
        await index.withdraw("i-a")
        await index.withdraw("i-b")
        await index.announce(replace(node("a"), instance_id="i-a2"), 60)
        clock.now += 1
        await table.refresh()
        assert {n.instance_id for n in table.nodes} == {"i-a2", "i-b"}, "b is late, a was replaced"
        clock.now += RETURN_GRACE_S + 1
        await table.refresh()
        assert {n.instance_id for n in table.nodes} == {"i-a2"}

    asyncio.run(scenario())


def test_refreshing_again_at_once_does_not_ask_again() -> None:
    async def scenario() -> None:
        clock, index = Clock(), MemoryIndex()
        table = NodeTable(index, "tiny", clock)
        await table.refresh()
        await index.announce(node("a"), 60)
        await asyncio.gather(table.refresh(), table.refresh())
        assert table.nodes == ()
        clock.now += 2 * MIN_REFRESH_S
        await table.refresh()
        assert len(table.nodes) == 1

    asyncio.run(scenario())


def test_a_node_of_another_model_is_not_used() -> None:
    async def scenario() -> None:
        index = MemoryIndex()
        table = NodeTable(index, "tiny")
        await index.announce(replace(node("a"), model="other"), 60)
        await table.refresh()
        assert table.nodes == ()
        assert [n.node_id for n in table.strangers] == ["a"]

    asyncio.run(scenario())


def test_the_context_limit_is_one_that_every_node_can_take() -> None:
    async def scenario() -> None:
        index = MemoryIndex()
        table = NodeTable(index, "tiny")
        assert table.max_model_len is None
        await index.announce(node("a"), 60)
        await index.announce(replace(node("p", Role.PREFILL), max_model_len=100), 60)
        await table.refresh()
        assert table.max_model_len == 100

    asyncio.run(scenario())


def lookup(index: MemoryIndex, clock: Clock, timeout_s: float = 0.05) -> tuple[PrefixLookup, GatewayMetrics]:
    metrics = GatewayMetrics(CollectorRegistry())
    return PrefixLookup(index, timeout_s, metrics, clock), metrics


async def matched(lookup: PrefixLookup, ids: list[int], salt: str, cards: list[LayoutCard]) -> dict[str, int]:
    return (await lookup.match((await prompt_names(ids, salt, cards)).values())).held


IDS = list(range(40))
NAMES = block_names(root_name("fake-model", "fake-numerics", ""), IDS, 16)


def test_a_lookup_finds_what_a_node_stored_under_the_shared_names() -> None:
    async def scenario() -> None:
        index = FlakyIndex()
        await index.announce(node("a"), 60)
        await index.store("i-a", NAMES[:1])
        prefixes, _ = lookup(index, Clock())
        assert await matched(prefixes, IDS, "", [CARD]) == {"i-a": 1}
        assert await matched(prefixes, IDS, "another tenant", [CARD]) == {}
        other = replace(CARD, numerics_id="other")
        assert await matched(prefixes, IDS, "", [other, CARD]) == {"i-a": 1}
        before = index.num_lookups
        assert await matched(prefixes, IDS[:15], "", [CARD]) == {}
        assert index.num_lookups == before, "no full block, nothing to ask"

    asyncio.run(scenario())


def test_a_failing_or_hanging_index_costs_one_timeout_and_is_then_left_alone() -> None:
    async def scenario(*, hangs: bool) -> None:
        clock, index = Clock(), FlakyIndex()
        await index.announce(node("a"), 60)
        await index.store("i-a", NAMES)
        index.hangs, index.fails = hangs, not hangs
        prefixes, metrics = lookup(index, clock)
        for _ in range(20):
            assert await matched(prefixes, IDS, "", [CARD]) == {}
        assert index.num_lookups == 1
        assert metrics.registry.get_sample_value("kvferry:index_lookup_failures_total") == 1
        index.hangs = index.fails = False
        clock.now += INDEX_PAUSE_S
        assert await matched(prefixes, IDS, "", [CARD]) == {"i-a": 2}

    asyncio.run(scenario(hangs=True))
    asyncio.run(scenario(hangs=False))


def test_the_ledger_returns_to_nothing_however_often_entries_are_closed() -> None:
    ledger = Ledger()
    plan = choose(RouteRequest("r", 500), [node("d", Role.DECODE), node("p", Role.PREFILL)], {"i-p": 5})
    entry, other = ledger.open(plan, 3), ledger.open(plan, 1)
    assert ledger.in_flight == {"i-d": InFlight(4, 0), "i-p": InFlight(0, 2 * 420, 2 * num_positions(80, 500))}
    entry.prompt_done()
    entry.prompt_done()
    assert ledger.in_flight == {"i-d": InFlight(4, 0), "i-p": InFlight(0, 420, num_positions(80, 500))}
    entry.close()
    entry.close()
    other.close()
    assert ledger.in_flight == {}


def test_the_ledger_tells_who_computes_a_prompts_beginning_until_its_first_token() -> None:
    ledger, names = Ledger(), [bytes([n]) for n in range(9)]
    long, short = (ledger.enter("i-d", f"i-{n}", InFlight(1, 50), names[:n]) for n in (8, 5))
    ledger.enter("i-d", "i-other", InFlight(1, 50), [b"x", *names[1:]])
    assert ledger.coming([[*names[:6], b"y", b"z"]]) == {"i-8": 6, "i-5": 5}
    assert ledger.coming([[], [b"x"], names[1:]]) == {"i-other": 1}
    assert ledger.coming([names], {"i-8": 3, "i-5": 6, "i-elsewhere": 2}) == {"i-8": 8, "i-5": 6, "i-elsewhere": 2}
    long.reported()
    assert ledger.coming([names]) == {"i-8": 8, "i-5": 5}, "it is not computed yet"
    long.prompt_done()
    assert ledger.coming([names]) == {"i-5": 5}
    short.close()
    assert ledger.coming([names]) == {}
    assert len(ledger._coming) == 1


def test_the_ledger_stays_small_while_no_report_comes() -> None:
    ledger = Ledger()
    for _ in range(100):
        ledger.enter("i-d", "i-p", InFlight(1, 50)).close()
    assert sum(map(len, ledger._unreported.values())) == 1


def test_prompt_tokens_count_until_the_nodes_own_report_has_them() -> None:
    clock = Clock()
    ledger = Ledger(clock)
    busy = node("p", Role.PREFILL, num_waiting_tokens=100)
    nodes = [node("d", Role.DECODE), busy]
    ledger.note_reports(nodes)
    plan = choose(RouteRequest("r", 500), nodes, {})
    assert plan.chosen.computed_by == "i-p"
    early = ledger.open(plan, 1)
    clock.now += REPORT_AGE_S
    late = ledger.open(plan, 1)
    assert ledger.in_flight["i-p"] == InFlight(0, 1000, 250_000)
    ledger.note_reports(nodes)
    assert ledger.in_flight["i-p"] == InFlight(0, 1000, 250_000), "the same report again says nothing"
    ledger.note_reports([nodes[0], replace(busy, load=replace(busy.load, num_waiting_tokens=600))])
    assert ledger.in_flight["i-p"] == InFlight(0, 500, 125_000), "the late one was sent after it may have been written"
    early.close()
    late.close()
    assert ledger.in_flight == {}


def test_a_prompt_whose_beginning_is_pulled_first_counts_until_a_report_from_after_that() -> None:
    """While blocks are on their way the node has not queued what comes after them, and a report does not have it."""
    clock = Clock()
    ledger = Ledger(clock)

    def reported(num_waiting_tokens: int) -> list[NodeRecord]:
        idle = node("p", Role.PREFILL, num_waiting_tokens=num_waiting_tokens, pull_bytes_per_s=1e6)
        return [node("d", Role.DECODE), idle, node("warm", Role.PREFILL, num_waiting_tokens=10**6)]

    plan = choose(RouteRequest("r", 20_000), reported(0), {"i-warm": 1200})
    assert (plan.chosen.computed_by, plan.chosen.num_uncached) == ("i-p", 800)
    assert plan.chosen.pull_ms > 1000
    entry, short = ledger.open(plan, 1), ledger.enter("i-d", "i-p", InFlight(1, 30))
    clock.now += REPORT_AGE_S
    ledger.note_reports(reported(1))
    assert ledger.in_flight["i-p"].num_prompt_tokens == 800, "what was sent later and pulls nothing is reported"
    clock.now += plan.chosen.pull_ms / 1e3
    ledger.note_reports(reported(800))
    assert "i-p" not in ledger.in_flight
    entry.close()
    short.close()
    assert (ledger.in_flight, ledger._unreported) == ({}, {})


@pytest.mark.parametrize(("weight", "computers"), [(0.2, "dp"), (4.0, "pp")])
def test_a_burst_of_equal_prompts_is_spread_before_any_node_has_told_of_it(weight: float, computers: str) -> None:
    """What is sent counts at once. Whether decode nodes take part is a matter of what their streams' delay weighs."""
    ledger, served = Ledger(), []
    nodes = [*(node(f"d{i}", Role.DECODE) for i in range(4)), *(node(f"p{i}", Role.PREFILL) for i in range(4))]
    for number in range(8):
        request = RouteRequest(f"r{number}", 2000, dict(ledger.in_flight), stream_delay_weight=weight)
        plan = choose(request, nodes, {})
        assert plan.ttft_ms > 2000
        served.append(plan.chosen.computed_by)
        ledger.open(plan, 1)
    assert sorted(served) == sorted(f"i-{role}{i}" for role in computers for i in range(4))
