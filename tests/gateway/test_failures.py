"""Nodes that refuse, fail, hang, break off or are somebody else: each request ends exactly once, and truthfully."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.common.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    Internal,
    KvferryError,
    ModelNotFound,
    Overloaded,
    PromptExceedsPool,
    Unavailable,
)
from kvferry.common.nodes import NodeLoad, NodeState, Role
from kvferry.common.requests import FinishReason, GenerateRequest, RequestOutput
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, events, eventually, gateway, run, text_of
from tests.gateway.tiny_tokenizer import tiny_tokenizer

PROMPT = "The quick brown fox jumps"


def error_of(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The one error event, which comes last."""
    assert [event for event in stream if "error" in event] == stream[-1:]
    error: dict[str, Any] = stream[-1]["error"]
    return error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadRequest("no good", param="prompt"), 400),
        (PromptExceedsPool("needs 100 blocks, the pool has 64"), 400),
        (ModelNotFound("who?"), 404),
        (Overloaded("pool full"), 429),
        (Unavailable("leaving"), 503),
        (DeadlineExceeded("prefill took too long"), 504),
        (Internal("bug"), 500),
        (Cancelled("not by us"), 503),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_nodes_refusal_keeps_its_class_and_message(error: KvferryError, status: int, stream: bool) -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.complete(PROMPT, stream=stream)
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
        body = response.json()["error"]
        assert body["message"] == error.message
        assert body["param"] == error.param
        assert ("retry-after" in response.headers) == (status in (429, 503))
        assert len(setup.nodes[0].submitted) == 1

    run(gateway(FakeDecode(Behaviour(error=error))), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_engine_after_tokens_is_one_event_and_never_retried(stream: bool) -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.complete(PROMPT, stream=stream, max_tokens=8)
        if stream:
            parts = events(response.text)
            assert PROMPT.startswith(text_of(parts))
            assert len([choice for event in parts for choice in event.get("choices", ())]) == 3
            assert error_of(parts)["code"] == "internal"
        else:
            assert response.status_code == 500
        assert setup.metric("request_success_total", finished_reason="error") == 1
        assert setup.metric("request_errors_total", code="internal") == 1
        assert sum(len(node.submitted) for node in setup.nodes) == 1

    broken = Behaviour(error=Internal("out of luck"), error_after=3, step_s=0.005)
    run(gateway(FakeDecode(broken), FakeDecode(broken, node_id="d1")), scenario)


def test_a_lost_session_ends_each_of_its_requests_exactly_once() -> None:
    async def scenario(setup: Setup) -> None:
        responses = await asyncio.gather(
            *(setup.complete(PROMPT, max_tokens=50, stream=True, n=2) for _ in range(5)),
            *(setup.complete(PROMPT, max_tokens=50) for _ in range(5)),
        )
        for response in responses[:5]:
            error = error_of(events(response.text))
            assert error["code"] == "unavailable"
            assert "d0" in error["message"]
        for response in responses[5:]:
            assert response.status_code == 503
        assert setup.metric("request_success_total", finished_reason="error") == 15
        setup.nodes[0].behaviour = Behaviour()
        assert (await setup.complete(PROMPT)).status_code == 200, "the node is alive, the next request works"

    run(gateway(FakeDecode(Behaviour(drop_after=3, step_s=0.03)), max_resumptions=0), scenario)


def test_a_node_that_stops_without_a_word_is_an_error_too() -> None:
    async def scenario(setup: Setup) -> None:
        request = asyncio.create_task(setup.complete(PROMPT, max_tokens=100, stream=True))
        node = setup.nodes[0]
        await eventually(lambda: node.num_running == 1)
        await node.stop()
        assert error_of(events((await request).text))["code"] == "unavailable"

    run(gateway(FakeDecode(Behaviour(hang_after=2)), resume_timeout=0.1), scenario)


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("draining soon")])
def test_a_refusal_before_any_token_is_retried_once_elsewhere(error: KvferryError) -> None:
    async def scenario(setup: Setup) -> None:
        first, second = setup.nodes
        while not first.submitted:  # whichever is asked first
            assert (await setup.complete(PROMPT, max_tokens=3)).status_code == 200
        assert second.submitted[-1].attempt == 1
        assert setup.metric("request_retries_total") == len(first.submitted) == 1
        first.behaviour = second.behaviour = Behaviour(error=error)
        tried = len(first.submitted) + len(second.submitted)
        assert (await setup.complete(PROMPT)).json()["error"]["message"] == error.message
        assert len(first.submitted) + len(second.submitted) == tried + 2

    run(gateway(FakeDecode(Behaviour(error=error)), FakeDecode(node_id="d1")), scenario)


def test_two_attempts_are_all() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.complete(PROMPT)).status_code == 429
        assert sum(len(node.submitted) for node in setup.nodes) == 2

    run(gateway(*(FakeDecode(Behaviour(error=Overloaded("full")), node_id=f"d{n}") for n in range(3))), scenario)


def test_what_an_older_attempt_still_had_to_say_is_dropped() -> None:
    async def scenario(setup: Setup) -> None:
        asked = asyncio.create_task(setup.complete(PROMPT, max_tokens=len(tiny_tokenizer().encode(PROMPT))))
        await eventually(lambda: setup.nodes[0].num_running == 1)
        (mailbox,) = setup.gateway.service.mailboxes
        (request,) = setup.nodes[0].submitted
        mailbox.put(RequestOutput(request.request_id, attempt=5, token_ids=(300,)))
        assert (await asked).json()["choices"][0]["text"] == PROMPT

    run(gateway(FakeDecode(Behaviour(step_s=0.02))), scenario)


def test_a_bad_request_is_not_retried() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.complete(PROMPT)).status_code == 400
        assert sum(len(node.submitted) for node in setup.nodes) == 1

    bad = Behaviour(error=BadRequest("no"))
    run(gateway(FakeDecode(bad), FakeDecode(bad, node_id="d1")), scenario)


def test_a_node_that_refuses_connections_is_avoided() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.nodes[0].stop()
        for _ in range(10):
            assert (await setup.complete(PROMPT, max_tokens=2)).status_code == 200
        assert setup.metric("request_retries_total") <= 1, "once it failed it is left alone for a while"

    run(gateway(FakeDecode(), FakeDecode(node_id="d1")), scenario)


def test_another_instance_behind_the_address_is_not_believed() -> None:
    async def scenario(setup: Setup) -> None:
        node = setup.nodes[0]
        node.welcome_id = "somebody else"
        response = await setup.complete(PROMPT)
        assert response.status_code == 503
        assert "another instance" in response.json()["error"]["message"]
        assert node.submitted == [], "nothing was sent to it"

    run(gateway(FakeDecode(), resume_timeout=0.1), scenario)


def test_a_node_replaced_behind_its_address_is_used_as_soon_as_it_is_announced() -> None:
    async def scenario(setup: Setup) -> None:
        node = setup.nodes[0]
        assert (await setup.complete(PROMPT)).status_code == 200
        await node.stop()
        assert (await setup.complete(PROMPT)).status_code == 503
        async with FakeDecode(node_id="d0") as reborn:
            await setup.announce(reborn)
            await asyncio.sleep(0.15)
            assert (await setup.complete(PROMPT)).status_code == 200
            assert len(reborn.submitted) == 1

    run(gateway(FakeDecode(), resume_timeout=0.1), scenario)


def test_messages_for_unknown_requests_older_attempts_and_wrong_choices_are_dropped() -> None:
    def ghosts(request: GenerateRequest) -> list[RequestOutput]:
        token = tuple(tiny_tokenizer().encode("ghost"))
        return [
            RequestOutput("nobody", token_ids=token),
            RequestOutput(request.request_id, attempt=7, token_ids=token, finish_reason=FinishReason.STOP),
            RequestOutput(request.request_id, index=5, token_ids=token, finish_reason=FinishReason.STOP),
        ]

    async def scenario(setup: Setup) -> None:
        body = (await setup.complete(PROMPT, max_tokens=len(tiny_tokenizer().encode(PROMPT)))).json()
        assert body["choices"][0]["text"] == PROMPT

    run(gateway(FakeDecode(Behaviour(ghosts=ghosts))), scenario)


def test_a_message_that_makes_no_sense_breaks_one_session_only() -> None:
    def nonsense(request: GenerateRequest) -> list[RequestOutput]:
        return [RequestOutput(request.request_id, finish_reason="nonsense")]  # type: ignore[arg-type]

    async def scenario(setup: Setup) -> None:
        bad, good = setup.nodes
        while not bad.submitted:  # whichever is asked first
            assert (await setup.complete(PROMPT)).status_code == 200
        assert good.submitted[-1].attempt == 1

    run(gateway(FakeDecode(Behaviour(ghosts=nonsense)), FakeDecode(node_id="d1")), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_first_token_that_does_not_come_is_a_timeout(stream: bool) -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.complete(PROMPT, stream=stream)
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        await eventually(lambda: setup.nodes[0].num_running == 0)

    run(gateway(FakeDecode(Behaviour(hang_after=0)), queue_timeout=0.3), scenario)


def test_a_next_token_that_does_not_come_is_an_error_event() -> None:
    async def scenario(setup: Setup) -> None:
        stream = events((await setup.complete(PROMPT, stream=True)).text)
        assert error_of(stream)["code"] == "deadline_exceeded"
        await eventually(lambda: setup.nodes[0].num_running == 0)

    run(gateway(FakeDecode(Behaviour(hang_after=2)), queue_timeout=0.3), scenario)


def test_a_node_that_never_says_welcome_is_given_up() -> None:
    async def scenario(setup: Setup) -> None:
        ended = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            ended.set()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            await setup.nodes[0].stop()
            setup.nodes[0].address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            await setup.announce()
            await asyncio.sleep(0.15)
            await setup.gateway.table.refresh()
            response = await setup.complete(PROMPT)
            assert response.status_code == 503
            assert response.elapsed.total_seconds() < 3
            await asyncio.wait_for(ended.wait(), 5)

    run(gateway(FakeDecode(), peer_timeout_s=0.5, resume_timeout=0.1), scenario)


def test_no_node_is_unavailable_and_one_that_comes_is_used() -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.complete(PROMPT)
        assert response.status_code == 503
        assert "no node is registered yet" in response.json()["error"]["message"]
        async with FakeDecode() as node:
            await setup.announce(node)
            await asyncio.sleep(0.15)
            assert (await setup.complete(PROMPT)).status_code == 200

    run(gateway(), scenario)


def test_only_prefill_or_draining_nodes_are_no_help() -> None:
    async def scenario(setup: Setup) -> None:
        assert "no decode node is ready" in (await setup.complete(PROMPT)).json()["error"]["message"]
        async with FakeDecode(node_id="d1") as leaving:
            leaving.state = NodeState.DRAINING
            await setup.announce(leaving)
            await asyncio.sleep(0.15)
            error = (await setup.complete(PROMPT)).json()["error"]
            assert error["code"] == "draining"

    run(gateway(FakeDecode(role=Role.PREFILL)), scenario)


def test_requests_over_the_limit_are_refused_at_once() -> None:
    async def scenario(setup: Setup) -> None:
        running = [asyncio.create_task(setup.complete(PROMPT)) for _ in range(2)]
        await eventually(lambda: setup.nodes[0].num_running == 2)
        response = await setup.complete(PROMPT)
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    run(gateway(FakeDecode(Behaviour(hang_after=0)), max_num_requests=2), scenario)


def test_prefill_candidates_reach_the_decode_node() -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.complete(PROMPT)
        (submitted,) = setup.nodes[0].submitted
        prefill = setup.nodes[1]
        assert [(c.instance_id, c.address) for c in submitted.prefill] == [(prefill.instance_id, prefill.address)]
        assert not submitted.local_by_choice
        assert response.headers["x-kvferry-route"].startswith("decode=d0 prefill=p0 ")

    run(gateway(FakeDecode(role=Role.DECODE), FakeDecode(node_id="p0", role=Role.PREFILL)), scenario)


def test_without_a_prefill_node_the_decode_node_computes_the_route_says_so_and_one_that_comes_back_is_used() -> None:
    decode, prefill = FakeDecode(role=Role.DECODE), FakeDecode(node_id="p0", role=Role.PREFILL)

    async def route(setup: Setup) -> tuple[str, bool]:
        response = await setup.complete([5] * 400, max_tokens=1)
        assert response.status_code == 200
        submitted = decode.submitted[-1]
        return response.headers["x-kvferry-route"].split(" matched")[0], submitted.local_by_choice

    async def scenario(setup: Setup) -> None:
        table = setup.gateway.table
        assert await route(setup) == ("decode=d0 prefill=p0", False)
        prefill.state = NodeState.DRAINING
        await setup.announce(prefill)
        await eventually(lambda: prefill.record() in table.nodes)
        assert await route(setup) == ("decode=d0 prefill=none", False)
        prefill.instance_id, prefill.state = "the next one", NodeState.READY
        await setup.announce(prefill)
        await eventually(lambda: prefill.record() in table.nodes)
        assert await route(setup) == ("decode=d0 prefill=p0", False)

    run(gateway(decode, prefill), scenario)


@pytest.mark.parametrize("has_prefill", [True, False])
def test_a_decode_node_is_told_whether_it_computes_by_choice_or_for_want_of_a_prefill_node(has_prefill: bool) -> None:
    decode, busy = FakeDecode(role=Role.DECODE), FakeDecode(node_id="p0", role=Role.PREFILL)
    busy.load = NodeLoad(num_waiting_tokens=100_000)

    async def scenario(setup: Setup) -> None:
        response = await setup.complete([5] * 400, max_tokens=1)
        (submitted,) = decode.submitted
        assert (submitted.prefill, submitted.local_by_choice) == ((), has_prefill)
        assert response.headers["x-kvferry-route"].startswith("decode=d0 prefill=none ")

    run(gateway(decode, *[busy] * has_prefill), scenario)


def test_draining_refuses_new_requests_lets_others_finish_and_then_ends_them() -> None:
    async def scenario(setup: Setup) -> None:
        setup.nodes[0].behaviour = Behaviour(step_s=0.02)
        finishing = asyncio.create_task(setup.complete(PROMPT, max_tokens=5))
        await eventually(lambda: setup.nodes[0].num_running == 1)
        setup.nodes[0].behaviour = Behaviour(hang_after=1)
        hanging = asyncio.create_task(setup.complete(PROMPT, stream=True))
        await eventually(lambda: setup.nodes[0].num_running == 2)
        setup.gateway.drain()
        assert (await setup.complete(PROMPT)).json()["error"]["code"] == "draining"
        assert (await setup.client.get("/ready")).status_code == 503
        assert (await setup.client.get("/health")).status_code == 200
        assert (await finishing).status_code == 200
        setup.gateway.end_grace()
        assert error_of(events((await hanging).text))["code"] == "draining"

    run(gateway(FakeDecode()), scenario)
