"""Decode nodes lost in mid-stream: the client's stream goes on behind what it has had, or ends in one error."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvferry.common.errors import BadRequest, Draining, Internal, KvferryError, Overloaded, Unavailable
from kvferry.common.requests import GenerateRequest, RequestOutput, ResumedChoice
from tests.gateway.fake_decode import CARD, Behaviour, FakeDecode
from tests.gateway.harness import Setup, events, eventually, gateway, run, text_of
from tests.gateway.test_failures import error_of
from tests.gateway.tiny_tokenizer import tiny_tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog"
IDS = tuple(tiny_tokenizer().encode(PROMPT))
END = 2


def answer(request: GenerateRequest, index: int) -> list[int]:
    """Another one for each choice, of another length: 4 tokens, 8, 12, … and then the node's stop token."""
    cycle = itertools.cycle(request.prompt_token_ids)
    return list(itertools.islice(cycle, index, index + min(4 * (index + 1), request.sampling.max_tokens)))


def lossy(**fields: Any) -> Behaviour:
    """Each request's first attempt is lost, on whichever node it is."""
    return Behaviour(**({"tokens": answer, "num_bad_attempts": 1, "step_s": 0.002} | fields))


def two(behaviour: Behaviour) -> tuple[FakeDecode, FakeDecode]:
    return FakeDecode(behaviour), FakeDecode(replace(behaviour), node_id="d1")


def submissions(setup: Setup) -> list[GenerateRequest]:
    return sorted((r for node in setup.nodes for r in node.submitted), key=lambda r: (r.request_id, r.attempt))


def content(response: httpx.Response, *, stream: bool) -> dict[str, Any]:
    """All that a client could compare, per choice, however it was cut into events."""
    assert response.status_code == 200, response.text
    if not stream:
        body = response.json()
        return {"choices": body["choices"], "usage": body["usage"]}
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events(response.text):
        assert "error" not in event, event
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            kept = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "ends": []})
            kept["text"] += choice.get("text") or choice.get("delta", {}).get("content", "")
            if choice["logprobs"]:
                kept["logprobs"] += sorted(choice["logprobs"].items())
            if choice["finish_reason"]:
                kept["ends"].append((choice["finish_reason"], choice["stop_reason"]))
    return {
        "choices": {i: kept | {"logprobs": _joined(kept["logprobs"])} for i, kept in choices.items()},
        "usage": usage,
    }


def _joined(parts: list[tuple[str, list[Any]]]) -> dict[str, list[Any]]:
    joined: dict[str, list[Any]] = {}
    for name, values in parts:
        joined.setdefault(name, []).extend(values or [])
    return joined


CASES: dict[str, dict[str, Any]] = {
    "plain": {"max_tokens": 12},
    "logprobs": {"max_tokens": 12, "logprobs": 2},
    "several choices, of which one is short": {"max_tokens": 12, "n": 3, "logprobs": 0},
    "a stop string across the loss": {"max_tokens": 12, "n": 3, "stop": ["ck brown", "fox"]},
    "an included stop string": {"max_tokens": 12, "n": 3, "stop": ["brown"], "include_stop_str_in_output": True},
    "the prompt's own log-probabilities": {"max_tokens": 12, "n": 2, "echo": True, "logprobs": 1},
    "min_tokens": {"max_tokens": 12, "min_tokens": 6, "stop": ["quick"]},
    "only the prompt": {"max_tokens": 0, "echo": True},
    "two prompts": {"prompt": [PROMPT, "lazy dog"], "max_tokens": 12, "n": 2},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_the_client_sees_nothing_of_a_loss(case: str, after: int, stream: bool) -> None:
    body = {"seed": 7, "stream": stream} | CASES[case]
    if stream:
        body["stream_options"] = {"include_usage": True}
    prompt = body.pop("prompt", PROMPT)
    seen: list[dict[str, Any]] = []

    async def scenario(setup: Setup) -> None:
        seen.append(content(await setup.complete(prompt, **body), stream=stream))

    calm = Behaviour(tokens=answer, stop_token_id=END)
    run(gateway(FakeDecode(calm)), scenario)
    run(gateway(*two(lossy(drop_after=after, stop_token_id=END))), scenario)
    assert seen[1] == seen[0]


def test_what_is_submitted_again_is_the_tokens_of_the_choices_that_have_not_ended() -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.complete(PROMPT, max_tokens=12, n=3, seed=5, prompt_logprobs=0, stop=["The quick brown"])
        assert response.status_code == 200
        first, second = submissions(setup)
        assert (first.attempt, first.resumed) == (0, ())
        assert second.attempt == 1
        # choice 0 has had its 4 tokens, the other two 5 of 8 and of 12
        assert second.resumed == tuple(ResumedChoice(i, IDS[i : i + 5]) for i in (1, 2))
        assert first.sampling.prompt_logprobs == 0
        assert second.sampling == replace(first.sampling, prompt_logprobs=None), "it must not come twice"
        assert second.prompt_token_ids == first.prompt_token_ids
        assert setup.metric("request_resumes_total", reason="node_lost") == 1
        assert setup.metric("request_retries_total") == 0

    run(gateway(*two(lossy(drop_after=5))), scenario)


def test_a_request_without_a_seed_goes_on_with_the_one_drawn_for_it() -> None:
    async def scenario(setup: Setup) -> None:
        await asyncio.gather(*(setup.complete(PROMPT, max_tokens=12) for _ in range(4)))
        seeds = {request.request_id: request.sampling.seed for request in submissions(setup)}
        assert len(set(seeds.values())) == 4
        assert all(request.sampling.seed == seeds[request.request_id] for request in submissions(setup))

    run(gateway(*two(lossy(drop_after=2))), scenario)


def test_a_loss_before_the_first_token_is_a_retry() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.complete(PROMPT, max_tokens=4)).status_code == 200
        assert [request.resumed for request in submissions(setup)] == [(), ()]
        assert setup.metric("request_retries_total") == 1
        assert setup.metric("request_resumes_total", reason="node_lost") == 0

    run(gateway(*two(lossy(drop_after=0))), scenario)


def test_a_request_may_be_lost_as_often_as_the_budget_says_and_not_once_more() -> None:
    async def scenario(setup: Setup) -> None:
        for node in setup.nodes:
            node.behaviour = lossy(drop_after=2, num_bad_attempts=3, tokens=_long)
        assert text_of(events((await setup.complete(PROMPT, max_tokens=9, stream=True)).text)) == _text(9)
        assert setup.metric("request_resumes_total", reason="node_lost") == 3
        for node in setup.nodes:
            node.behaviour = lossy(drop_after=2, num_bad_attempts=4, tokens=_long)
        stream = events((await setup.complete(PROMPT, max_tokens=9, stream=True)).text)
        assert error_of(stream)["code"] == "unavailable"
        assert "as often as it may" in error_of(stream)["message"]
        assert text_of(stream) == _text(8), "what has come is neither lost nor repeated"
        assert setup.metric("request_resumes_total", reason="node_lost") == 6

    nodes = (FakeDecode(node_id=f"d{i}") for i in range(5))
    run(gateway(*nodes), scenario)


def test_a_budget_of_nothing_is_one_error_event() -> None:
    async def scenario(setup: Setup) -> None:
        stream = events((await setup.complete(PROMPT, max_tokens=9, stream=True)).text)
        assert error_of(stream)["code"] == "unavailable"
        assert len(submissions(setup)) == 1

    run(gateway(*two(lossy(drop_after=2)), max_resumptions=0), scenario)


def test_what_the_lost_attempt_still_has_to_say_is_not_heard() -> None:
    def late(request: GenerateRequest) -> list[RequestOutput]:
        """By way of the new node's session, so that only the attempt number tells."""
        if not request.attempt:
            return []
        ghost = RequestOutput(request.request_id, attempt=request.attempt - 1, token_ids=(300, 301))
        return [ghost, replace(ghost, token_ids=(), error_code="internal", error_message="late")]

    async def scenario(setup: Setup) -> None:
        asked = asyncio.create_task(setup.complete(PROMPT, max_tokens=9))
        await eventually(lambda: len(submissions(setup)) == 2)
        (mailbox,) = setup.gateway.service.mailboxes
        mailbox.put(RequestOutput(submissions(setup)[0].request_id, attempt=0, token_ids=(300,)))
        assert (await asked).json()["choices"][0]["text"] == _text(9)

    run(gateway(*two(lossy(drop_after=3, tokens=_long, ghosts=late, step_s=0.02))), scenario)


def test_one_node_alone_is_waited_for_until_its_successor_is_there() -> None:
    async def scenario(setup: Setup) -> None:
        node = setup.nodes[0]
        asked = asyncio.create_task(setup.complete(PROMPT, max_tokens=9, stream=True))
        await eventually(lambda: node.num_running == 1)
        await node.stop()
        async with FakeDecode(Behaviour(tokens=_long), node_id="d0") as reborn:
            await setup.announce(reborn)
            assert text_of(events((await asked).text)) == _text(9)
            (again,) = reborn.submitted
            assert again.resumed == (ResumedChoice(0, IDS[:2]),)
            assert setup.metric("request_resumes_total", reason="node_lost") == 1

    run(gateway(FakeDecode(Behaviour(tokens=_long, hang_after=2)), max_resumptions=1), scenario)


def test_a_node_whose_connection_broke_takes_the_request_again_when_there_is_no_other() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.complete(PROMPT, max_tokens=9)).json()["choices"][0]["text"] == _text(9)
        assert setup.nodes[0].num_sessions == 2

    run(gateway(FakeDecode(lossy(tokens=_long, drop_after=4))), scenario)


@pytest.mark.parametrize("after", [0, 2])
def test_a_node_that_does_not_come_back_is_an_error_after_the_bound(after: int) -> None:
    async def scenario(setup: Setup) -> None:
        node = setup.nodes[0]
        asked = asyncio.create_task(setup.complete(PROMPT, max_tokens=9, stream=True))
        await eventually(lambda: node.num_running == 1 and setup.metric("generation_tokens_total") == after)
        await node.stop()
        response = await asked
        error = error_of(events(response.text)) if after else response.json()["error"]
        assert error["code"] == "unavailable"
        assert "no decode node took it over within 0.3 s" in error["message"]
        assert setup.metric("request_success_total", finished_reason="error") == 1

    run(gateway(FakeDecode(Behaviour(tokens=_long, hang_after=after)), resume_timeout=0.3), scenario)


def test_a_client_that_leaves_while_a_node_is_looked_for_leaves_nothing() -> None:
    async def scenario(setup: Setup) -> None:
        body = {"model": "tiny", "prompt": PROMPT, "stream": True, "max_tokens": 9}
        async with setup.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await setup.nodes[0].stop()
            await eventually(lambda: not setup.gateway.pool.sessions)
            assert setup.gateway.service.mailboxes
        await eventually(lambda: setup.metric("request_success_total", finished_reason="abort") == 1)
        await setup.nodes[0].__aenter__()
        await setup.announce()
        for _ in range(2):  # whoever still waited for a node would have found this one
            await setup.gateway.service._looked.wait()
        assert len(setup.nodes[0].submitted) == 1

    run(gateway(FakeDecode(Behaviour(tokens=_long, hang_after=2)), over_port=True), scenario)


def test_other_prompts_go_on_while_one_waits_for_a_node() -> None:
    """The first two nodes are asked for one prompt each, and one of them is lost for good."""

    async def scenario(setup: Setup) -> None:
        prompts = [PROMPT, "lazy dog"]
        body = {"model": "tiny", "prompt": prompts, "stream": True, "max_tokens": 400}
        async with setup.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            lost, other = sorted(setup.nodes, key=lambda node: node.submitted[0].prompt_token_ids != IDS)

            await lost.stop()
            other.behaviour.error = Overloaded("full")  # to whatever else it is asked
            await eventually(lambda: len(other.submitted) > 1)
            running = setup.metric("generation_tokens_total")
            await eventually(lambda: setup.metric("generation_tokens_total") > running + 20)

    nodes = two(Behaviour(tokens=_long, step_s=0.01))
    run(gateway(*nodes, over_port=True), scenario)


def test_a_draining_node_hands_over_and_that_does_not_count() -> None:
    async def scenario(setup: Setup) -> None:
        assert text_of(events((await setup.complete(PROMPT, max_tokens=9, stream=True)).text)) == _text(9)
        assert [len(request.resumed) for request in submissions(setup)] == [0, 1]
        assert setup.metric("request_resumes_total", reason="draining") == 1

    draining = lossy(error=Draining("has shut down"), error_after=3, tokens=_long)
    run(gateway(*two(draining), max_resumptions=0), scenario)


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("not now")])
def test_a_node_that_refuses_to_go_on_is_one_more_loss(error: KvferryError) -> None:
    async def scenario(setup: Setup) -> None:
        for node in setup.nodes:
            node.behaviour = replace(node.behaviour)
        asked = asyncio.create_task(setup.complete(PROMPT, max_tokens=40, stream=True))
        await eventually(lambda: len(submissions(setup)) == 1)
        for node in setup.nodes:
            if not node.submitted:
                node.behaviour = lossy(error=error, num_bad_attempts=2, tokens=_long)
        assert text_of(events((await asked).text)) == _text(40)
        assert [request.attempt for request in submissions(setup)] == [0, 1, 2]
        assert setup.metric("request_resumes_total", reason="node_lost") == 1, "it went on once"

    run(
        gateway(*two(lossy(drop_after=20, tokens=_long)), FakeDecode(lossy(drop_after=20, tokens=_long), node_id="d2")),
        scenario,
    )


@pytest.mark.parametrize("error", [BadRequest("needs 9 blocks"), Internal("bug")])
def test_a_final_error_of_the_next_node_is_the_one_error_event(error: KvferryError) -> None:
    async def scenario(setup: Setup) -> None:
        asked = asyncio.create_task(setup.complete(PROMPT, max_tokens=40, stream=True))
        await eventually(lambda: len(submissions(setup)) == 1)
        for node in setup.nodes:
            if not node.submitted:
                node.behaviour = Behaviour(error=error)
        stream = events((await asked).text)
        assert error_of(stream)["message"] == error.message
        assert text_of(stream) == _text(20)

    run(gateway(*two(lossy(drop_after=20, tokens=_long))), scenario)


@pytest.mark.parametrize("after", [0, 2])
def test_beams_begin_anew_unless_they_have_been_seen(after: int) -> None:
    async def scenario(setup: Setup) -> None:
        beams = {"use_beam_search": True, "n": 2, "temperature": 0}
        response = await setup.complete(PROMPT, max_tokens=6, **beams)
        if after:
            assert response.status_code == 503
            assert len(submissions(setup)) == 1
        else:
            assert response.status_code == 200
            assert [request.resumed for request in submissions(setup)] == [(), ()]

    run(gateway(*two(lossy(drop_after=after))), scenario)


@pytest.mark.parametrize("num_alike", [0, 1])
def test_nodes_that_compute_other_bits_are_the_last_resort(num_alike: int) -> None:
    async def scenario(setup: Setup) -> None:
        asked = asyncio.create_task(setup.complete(PROMPT, max_tokens=9))
        await eventually(lambda: setup.nodes[0].num_running == 1)
        others = [FakeDecode(Behaviour(tokens=_long), node_id=f"x{i}") for i in range(6)]
        for node in others[num_alike:]:
            node.card = replace(CARD, numerics_id="another processor")
        for node in others:
            await node.__aenter__()
        await setup.announce(*others)
        await asyncio.sleep(0.15)
        await setup.gateway.table.refresh()
        await setup.nodes[0].stop()
        assert (await asked).json()["choices"][0]["text"] == _text(9)
        (used,) = (i for i, node in enumerate(others) if node.submitted)
        assert used == 0 or not num_alike
        for node in others:
            await node.stop()

    run(gateway(FakeDecode(Behaviour(tokens=_long, hang_after=2))), scenario)


@pytest.fixture
def gateway_log() -> Iterator[list[logging.LogRecord]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("kvferry.gateway")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


def test_one_line_says_what_went_on_where_and_why(gateway_log: list[logging.LogRecord]) -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.complete(PROMPT, max_tokens=12, n=2)).status_code == 200
        (record,) = (record for record in gateway_log if record.getMessage().startswith("request goes on"))
        first, second = (next(n for n in setup.nodes if r in n.submitted) for r in submissions(setup))
        facts = {name: vars(record)[name] for name in ("prompt_id", "attempt", "from_node", "to_node", "num_tokens")}
        assert facts == {
            "prompt_id": submissions(setup)[0].request_id,
            "attempt": 1,
            "from_node": first.node_id,
            "to_node": second.node_id,
            "num_tokens": 4 + 5,  # one of the two has ended
        }
        assert vars(record)["reason"] == "node_lost"
        for node in setup.nodes:
            node.behaviour = Behaviour()
        await asyncio.gather(*(setup.complete(PROMPT) for _ in range(6)))  # messages keep their order
        assert [node.cancelled for node in setup.nodes] == [[], []], "nothing was left to cancel"

    run(gateway(*two(lossy(drop_after=5))), scenario)


def _long(request: GenerateRequest, index: int) -> list[int]:
    return list(itertools.islice(itertools.cycle(request.prompt_token_ids), request.sampling.max_tokens))


def _text(num_tokens: int) -> str:
    return tiny_tokenizer().decode(list(itertools.islice(itertools.cycle(IDS), num_tokens)))
