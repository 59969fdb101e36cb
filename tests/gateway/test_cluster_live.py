"""`/cluster/live`: what the operations page is drawn from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kvferry.common.errors import Overloaded
from kvferry.common.nodes import NodeState, Role
from kvferry.common.requests import GenerateRequest, RequestOutput, RequestTimes
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.gateway import cluster
from kvferry.services.gateway.cluster import NUM_SHOWN
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, eventually, gateway, run

TIMES = RequestTimes(queue_s=0.01, prefill_s=0.2, transfer_s=0.03, first_step_s=0.004)


class CountingNode(FakeDecode):
    """Counts how often it was asked how it is, and may keep silent."""

    num_asked = 0
    silent = False

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:  # noqa: N802
        self.num_asked += 1
        if self.silent:
            await asyncio.Event().wait()
        return await super().Stats(request, context)


class TimedNode(FakeDecode):
    """Its first outputs say where their time went, and that p0 has computed the prompt."""

    prefilled_by = ""

    def _step(self, request: GenerateRequest, *rest: Any) -> list[RequestOutput]:
        outputs = super()._step(request, *rest)
        return [replace(output, times=TIMES, prefilled_by=self.prefilled_by) for output in outputs]


async def live(setup: Setup) -> Any:
    setup.gateway.view._asked_at = float("-inf")  # as if the last watcher had asked long ago
    answer = await setup.client.get("/cluster/live")
    assert answer.status_code == 200
    return answer.json()


def test_a_request_is_told_with_its_route_its_phases_and_its_ending() -> None:
    node, prefill = TimedNode(Behaviour(cached_tokens=2)), FakeDecode(node_id="p0", role=Role.PREFILL)
    node.prefilled_by = prefill.instance_id

    async def scenario(setup: Setup) -> None:
        await setup.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4},
            headers={"x-request-id": "mine"},
        )
        state = await live(setup)
        (request,) = state["requests"]
        assert request["request_id"] == "mine"
        assert (request["kind"], request["ended"], request["is_error"]) == ("completion", "length", False)
        assert (request["prompt_tokens"], request["cached_tokens"], request["output_tokens"]) == (3, 2, 4)
        assert (request["decode"], request["prefill"], request["num_attempts"]) == ("d0", "p0", 1)
        assert request["times"] == {"queue_s": 0.01, "prefill_s": 0.2, "transfer_s": 0.03, "first_step_s": 0.004}
        assert 0 < request["first_token_s"] <= request["total_s"]
        assert abs(request["ended_at"] - state["now"]) < 60
        stats = state["stats"]
        assert (stats["num_requests"], stats["prompt_tokens"], stats["cached_tokens"]) == (1, 3, 2)
        assert stats["first_token"]["p50"] == pytest.approx(request["first_token_s"], rel=0.06)
        assert stats["inter_token"]["p50"] > 0
        assert stats["tokens_per_s"] > 0

    run(gateway(node, prefill), scenario)


def test_the_newest_come_first_and_only_so_many() -> None:
    async def scenario(setup: Setup) -> None:
        for number in range(NUM_SHOWN + 3):
            await setup.client.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "x", "max_tokens": 1},
                headers={"x-request-id": f"r{number}"},
            )
        state = await live(setup)
        assert [r["request_id"] for r in state["requests"]] == [f"r{n}" for n in range(NUM_SHOWN + 2, 2, -1)]
        assert state["num_ended"] == NUM_SHOWN + 3

    run(gateway(FakeDecode()), scenario)


def test_errors_and_clients_that_left_are_told_as_such() -> None:
    node = FakeDecode(Behaviour(error=Overloaded("full")))

    async def scenario(setup: Setup) -> None:
        assert (await setup.complete("x")).status_code == 429
        node.behaviour = Behaviour(hang_after=1)
        async with setup.client.stream(
            "POST", "/v1/completions", json={"model": "tiny", "prompt": "x", "stream": True}
        ) as answer:
            await anext(answer.aiter_lines())
        recent = setup.gateway.service.recent
        await eventually(lambda: recent.num_ended == 2)
        left, failed = (await live(setup))["requests"]
        assert (failed["ended"], failed["is_error"], failed["first_token_s"]) == ("overloaded", True, None)
        assert (left["ended"], left["is_error"], left["output_tokens"]) == ("abort", False, 1)

    run(gateway(node, over_port=True), scenario)


def test_nothing_of_prompts_answers_salts_and_keys_is_told() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.client.post(
            "/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": "marzipan marzipan marzipan"}],
                "cache_salt": "pistachio",
                "user": "hazelnut",
                "max_tokens": 60,
            },
            headers={"authorization": "Bearer walnut"},
        )
        answer = (await setup.client.get("/cluster/live")).text
        assert "chat" in answer
        for secret in ("marzipan", "pistachio", "hazelnut", "walnut"):
            assert secret not in answer
        assert set((await live(setup))["requests"][0]) == {
            "request_id",
            "kind",
            "ended_at",
            "prompt_tokens",
            "cached_tokens",
            "output_tokens",
            "decode",
            "prefill",
            "num_attempts",
            "times",
            "first_token_s",
            "total_s",
            "ended",
            "is_error",
        }

    run(gateway(FakeDecode()), scenario)


def test_a_crowd_of_watchers_asks_the_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MAX_AGE_S", 60.0)  # however slowly this machine answers the fiftieth
    node = CountingNode()

    async def scenario(setup: Setup) -> None:
        answers = await asyncio.gather(*(setup.client.get("/cluster/live") for _ in range(50)))
        assert len({answer.content for answer in answers}) == 1
        assert node.num_asked == 1
        await setup.client.get("/cluster")
        assert node.num_asked == 2

    run(gateway(node), scenario)


def test_a_node_that_hangs_is_shown_silent_and_requests_do_not_wait_for_it() -> None:
    node = CountingNode()
    node.silent = True

    async def scenario(setup: Setup) -> None:
        watching = asyncio.create_task(live(setup))
        await eventually(lambda: node.num_asked == 1)
        assert (await setup.complete("x", max_tokens=2)).status_code == 200
        assert not watching.done()
        state = await watching
        assert [shown["live"] for shown in state["nodes"]] == [False]
        assert "d0 is silent" in [alert["title"] for alert in state["alerts"]]
        node.silent = False
        assert [shown["live"] for shown in (await live(setup))["nodes"]] == [True]

    run(gateway(node), scenario)


def test_a_watcher_that_leaves_takes_nothing_from_the_next() -> None:
    node = CountingNode()
    node.silent = True

    async def scenario(setup: Setup) -> None:
        watching = asyncio.create_task(setup.gateway.view.live())
        await eventually(lambda: node.num_asked == 1)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        node.silent = False
        answer = await setup.client.get("/cluster/live")
        assert [shown["live"] for shown in answer.json()["nodes"]] == [True]

    run(gateway(node), scenario)


@pytest.mark.parametrize("state", [NodeState.READY, NodeState.DRAINING])
def test_a_node_that_left_is_missed_unless_it_was_draining(state: NodeState) -> None:
    gone = FakeDecode(node_id="d1")
    gone.state = state

    async def scenario(setup: Setup) -> None:
        assert "d1 has left" not in [alert["title"] for alert in (await live(setup))["alerts"]]
        setup.gateway.table._grace_until = float("-inf")  # as if the index had been there for a while
        await setup.index.withdraw(gone.instance_id)
        table = setup.gateway.table
        await eventually(lambda: [node.node_id for node in table.nodes] == ["d0"])
        titles = [alert["title"] for alert in (await live(setup))["alerts"]]
        assert ("d1 has left" in titles) == (state is NodeState.READY)

    run(gateway(FakeDecode(), gone), scenario)
