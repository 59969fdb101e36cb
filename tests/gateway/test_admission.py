"""A request that would wait too long is refused before anything is sent; nodes that fail are seen to be left alone."""

from __future__ import annotations

import asyncio

from kvferry.common.errors import Overloaded, Unavailable
from kvferry.common.nodes import NodeLoad
from kvferry.services.gateway.breaker import FIRST_PAUSE_S, PROBE_S, Breakers
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, eventually, gateway, run
from tests.gateway.test_nodes import Clock


def test_a_first_token_predicted_too_late_is_a_429_that_says_when_to_return() -> None:
    node = FakeDecode()
    node.load = NodeLoad(num_waiting_tokens=9_000, prefill_tokens_per_s=1000.0)

    async def scenario(setup: Setup) -> None:
        answer = await setup.complete()
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "overloaded"
        assert "about 9.0 s, the limit is 5 s" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"] == "5"
        assert node.submitted == []
        assert setup.metric("requests_refused_late_total") == 1

    run(gateway(node, max_ttft=5), scenario)


def test_requests_that_the_gateway_has_sent_itself_count_for_the_next_one() -> None:
    node = FakeDecode(Behaviour(hang_after=0))
    node.load = NodeLoad(prefill_tokens_per_s=10.0)

    async def scenario(setup: Setup) -> None:
        service = setup.gateway.service
        await setup.gateway.table.refresh()
        plan = await service.plan("first", 100, {}, frozenset())
        entry = service.ledger.open(plan, 1)
        assert (await setup.complete()).status_code == 429
        entry.close()

    run(gateway(node, max_ttft=9), scenario)


def test_several_prompts_of_one_request_are_admitted_or_refused_together() -> None:
    node = FakeDecode()
    node.load = NodeLoad(prefill_tokens_per_s=10.0)

    async def scenario(setup: Setup) -> None:
        answer = await setup.complete([[1] * 8] * 5, max_tokens=1)
        assert answer.status_code == 200
        assert len(answer.json()["choices"]) == 5

    run(gateway(node, max_ttft=1), scenario)


def test_a_node_that_keeps_failing_is_left_alone_and_shown() -> None:
    bad = FakeDecode(Behaviour(error=Unavailable("broken")), node_id="bad")
    good = FakeDecode(node_id="good")
    bad.load, good.load = NodeLoad(), NodeLoad(num_running=5)

    async def scenario(setup: Setup) -> None:
        for _ in range(6):
            assert (await setup.complete(max_tokens=2)).status_code == 200
        assert len(bad.submitted) == 3
        state = (await setup.client.get("/cluster")).json()
        assert state["breakers"][bad.instance_id]["state"] == "open"
        assert state["breakers"][bad.instance_id]["num_failures"] == 3
        assert setup.metric("breaker_opens_total") == 1
        await setup.gateway._look()
        assert setup.metric("breakers", state="open") == 1

    run(gateway(bad, good), scenario)


def test_a_node_that_comes_back_gets_one_request_until_it_answers() -> None:
    back, other = FakeDecode(Behaviour(hang_after=0), node_id="back"), FakeDecode(node_id="other")
    back.load, other.load = NodeLoad(), NodeLoad(num_running=5)

    async def scenario(setup: Setup) -> None:
        clock = Clock()
        breakers = setup.gateway.pool.breakers = Breakers(clock)
        breakers.failed(back.instance_id, lost=True)
        assert (await setup.complete(max_tokens=1)).status_code == 200
        assert back.submitted == [], "open"
        clock.now += FIRST_PAUSE_S
        probe = asyncio.create_task(setup.complete(max_tokens=1))
        await eventually(lambda: len(back.submitted) == 1)
        for _ in range(3):
            assert (await setup.complete(max_tokens=1)).status_code == 200
        assert len(back.submitted) == 1, "half open"
        back.behaviour = Behaviour()
        probe.cancel()
        clock.now += PROBE_S
        for _ in range(3):
            assert (await setup.complete(max_tokens=1)).status_code == 200
        assert len(back.submitted) == 4, "closed"

    run(gateway(back, other), scenario)


def test_a_node_without_room_is_not_taken_for_broken() -> None:
    full, other = FakeDecode(Behaviour(error=Overloaded("full")), node_id="full"), FakeDecode(node_id="other")
    full.load, other.load = NodeLoad(), NodeLoad(num_running=5)

    async def scenario(setup: Setup) -> None:
        for _ in range(6):
            assert (await setup.complete(max_tokens=2)).status_code == 200
        assert len(full.submitted) == 6
        assert (await setup.client.get("/cluster")).json()["breakers"] == {}

    run(gateway(full, other), scenario)
