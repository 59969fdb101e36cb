"""From what a gateway logs of a decision, the real router decides the same again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re

import pytest
from hypothesis import HealthCheck, given, settings

from kvferry.common.errors import BadRequest
from kvferry.common.log import JsonFormatter
from kvferry.common.nodes import NodeRecord, Role
from kvferry.services.gateway.decision import MARK, decide_again, find_decisions, to_json
from kvferry.services.gateway.plan import InFlight, RouteRequest
from kvferry.services.gateway.router import choose
from kvferry.services.local.explain import describe
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, eventually, gateway, run
from tests.gateway.test_router import clusters, node, plan_of


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(clusters())
def test_every_decision_follows_again_from_its_line(
    cluster: tuple[RouteRequest, list[NodeRecord], dict[str, int]],
) -> None:
    plan = plan_of(*cluster)
    again = decide_again(json.loads(json.dumps(to_json(plan))))
    assert again.is_same
    assert again.plan.chosen == plan.chosen
    assert again.plan.decode_candidates == plan.decode_candidates
    assert [h.instance_id for h in again.plan.holders] == [h.instance_id for h in plan.holders]


def test_a_large_fleet_is_logged_in_part_and_decided_alike() -> None:
    nodes = [node(f"d{n}", Role.DECODE, num_running=n % 7, step_ms=20.0 + n % 5) for n in range(300)]
    nodes += [node(f"p{n}", Role.PREFILL, num_waiting_tokens=n % 11 * 500) for n in range(200)]
    matches = {n.instance_id: len(n.node_id) * 3 for n in nodes[::5]}
    for number in range(20):
        plan = choose(RouteRequest(f"r{number}", 2000, {"i-d3": InFlight(4, 0)}), nodes, matches)
        line = to_json(plan)
        assert len(line["nodes"]) < 60
        assert decide_again(line).is_same


def test_a_line_that_tells_another_story_is_noticed() -> None:
    nodes = [node("a"), node("b", num_running=3)]
    line = to_json(choose(RouteRequest("r", 100), nodes, {}))
    told = decide_again(line | {"decode": "i-b"})
    assert not told.is_same
    assert "NOT THE SAME AGAIN: decode a" in describe(told)
    with pytest.raises(BadRequest, match="not a routing decision"):
        decide_again({"request_id": "r"})


def test_the_gateway_logs_one_line_for_each_decision_that_explain_reads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="kvferry.gateway")
    logging.getLogger("kvferry").propagate = True
    setup = gateway(FakeDecode(node_id="d0"), FakeDecode(node_id="d1"))

    async def scenario(setup: Setup) -> None:
        answer = await setup.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "Hello", "max_tokens": 2},
            headers={"x-request-id": "mine"},
        )
        chosen = re.search(r"decode=(\S+)", answer.headers["x-kvferry-route"])
        records = [r for r in caplog.records if r.getMessage().startswith(MARK)]
        assert len(records) == 1
        for line in (
            logging.Formatter("%(asctime)s %(message)s").format(records[0]),
            JsonFormatter().format(records[0]),
        ):
            (found,) = find_decisions([line, "another line", "404 GET /route {x", f"{MARK}{{", f"{MARK}{{}}"], "mine")
            decision = decide_again(found)
            assert decision.is_same
            assert chosen is not None
            assert decision.plan.decode.node_id == chosen[1]
            assert f"chosen: decode {chosen[1]}, prefill none" in describe(decision)
        assert list(find_decisions([line], "other")) == []
        plans = (await setup.client.get("/debug/route/mine")).json()["plans"]
        assert decide_again(plans[0]["decision"]).is_same

    run(setup, scenario)


def test_a_prompts_next_turn_is_told_who_computes_its_beginning() -> None:
    """The first request has no token yet; nobody holds anything."""
    setup = gateway(FakeDecode(Behaviour(hang_after=0)), stream_delay_weight=7.5)

    async def scenario(setup: Setup) -> None:
        prompt = "What was said before. " * 20
        first = asyncio.create_task(setup.complete(prompt))
        await eventually(lambda: len(setup.nodes[0].submitted) == 1)
        second = asyncio.create_task(
            setup.client.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": prompt + "And now?"},
                headers={"x-request-id": "next"},
            )
        )
        await eventually(lambda: len(setup.nodes[0].submitted) == 2)
        line = (await setup.client.get("/debug/route/next")).json()["plans"][0]["decision"]
        assert line["matches"] == {}
        assert line["coming"][setup.nodes[0].instance_id] > 0
        assert line["stream_delay_weight"] == 7.5
        assert decide_again(line).is_same
        for task in (first, second):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    run(setup, scenario)
