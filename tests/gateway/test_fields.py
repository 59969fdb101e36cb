"""vLLM's fields and endpoints beside OpenAI's, through the whole gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, events, eventually, gateway, run
from tests.gateway.test_http import error_of
from tests.gateway.test_tools import CALL, LOOKUP, TOKENIZER, saying
from tests.gateway.tiny_tokenizer import tiny_tokenizer

ANSWER = tiny_tokenizer().encode("naïve 🙂 café")
ENDS = [*ANSWER, 2]


def answering(**how: Any) -> FakeDecode:
    return FakeDecode(Behaviour(tokens=lambda request, index: ANSWER, stop_token_id=2, **how))


@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_token_ids_of_completions(tokens_per_step: int) -> None:
    async def scenario(setup: Setup) -> None:
        fields: dict[str, Any] = {"prompt": ["The fox", "Hello"], "n": 2, "max_tokens": 90, "return_token_ids": True}
        prompts = [tiny_tokenizer().encode(text) for text in fields["prompt"] for _ in range(2)]
        choices = (await setup.complete(**fields)).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == prompts
        assert [choice["token_ids"] for choice in choices] == [ENDS] * 4
        told: dict[int, list[Any]] = {}
        ids: dict[int, list[int]] = {}
        for choice in (
            c for event in events((await setup.complete(**fields, stream=True)).text) for c in event["choices"]
        ):
            ids.setdefault(choice["index"], []).extend(choice["token_ids"])
            if "prompt_token_ids" in choice:
                told.setdefault(choice["index"], []).append(choice["prompt_token_ids"])
        assert ids == dict.fromkeys(range(4), ENDS)
        assert told == {index: [prompt] for index, prompt in enumerate(prompts)}

    run(gateway(answering(tokens_per_step=tokens_per_step)), scenario)


@pytest.mark.parametrize("tools", [None, [LOOKUP]])
def test_token_ids_of_chats(tools: Any) -> None:
    async def scenario(setup: Setup) -> None:
        body = (await setup.chat("Hi", return_token_ids=True, tools=tools)).json()
        prompt = list(setup.nodes[0].submitted[0].prompt_token_ids)
        said = [*TOKENIZER.encode(CALL), 2]
        assert body["prompt_token_ids"] == prompt
        assert body["choices"][0]["token_ids"] == said
        stream = events((await setup.chat("Hi", return_token_ids=True, tools=tools, stream=True)).text)
        assert [event["prompt_token_ids"] for event in stream if "prompt_token_ids" in event] == [prompt]
        assert [token_id for event in stream for token_id in event["choices"][0]["token_ids"]] == said

    run(gateway(saying(CALL), tokenizer=TOKENIZER), scenario)


def test_no_token_ids_unless_asked_for() -> None:
    async def scenario(setup: Setup) -> None:
        for answer in (await setup.complete("Hi"), await setup.chat("Hi"), await setup.complete("Hi", stream=True)):
            assert "token_ids" not in answer.text

    run(gateway(answering()), scenario)


def test_the_last_message_is_gone_on_with() -> None:
    async def scenario(setup: Setup) -> None:
        messages = [{"role": "user", "content": "Say fox"}, {"role": "assistant", "content": "The quick "}]
        fields = {"continue_final_message": True, "add_generation_prompt": False}
        assert (await setup.chat(messages, **fields)).status_code == 200
        ids = list(setup.nodes[0].submitted[0].prompt_token_ids)
        assert tiny_tokenizer().decode(ids).endswith("<|im_start|>assistant\nThe quick")
        tokenized = await setup.client.post("/tokenize", json={"messages": messages, **fields})
        assert tokenized.json()["tokens"] == ids
        for bad in ({"continue_final_message": True}, fields | {"messages": [{"role": "user", "content": " "}]}):
            error = error_of(await setup.chat(**({"messages": messages} | bad)), 400)
            assert error["param"] == "continue_final_message"

    run(gateway(answering()), scenario)


def test_tools_count_in_tokenize() -> None:
    async def scenario(setup: Setup) -> None:
        messages = [{"role": "user", "content": "Hi"}]
        await setup.chat(messages, tools=[LOOKUP])
        body = (await setup.client.post("/tokenize", json={"messages": messages, "tools": [LOOKUP]})).json()
        assert body["tokens"] == list(setup.nodes[0].submitted[0].prompt_token_ids)
        assert body["count"] == len(body["tokens"])

    run(gateway(saying(CALL), tokenizer=TOKENIZER), scenario)


def test_a_request_id_in_the_body_counts_where_no_header_has_one() -> None:
    async def scenario(setup: Setup) -> None:
        answer = await setup.complete("Hi", request_id="mine-1")
        assert answer.headers["x-request-id"] == "mine-1"
        assert (await setup.client.get("/debug/route/mine-1")).status_code == 200
        setup.client.headers["x-request-id"] = "from-header"
        answer = await setup.complete("Hi", request_id="mine-2")
        assert answer.headers["x-request-id"] == "from-header"
        for bad in ("", "a b", "x" * 129, "é", "a\n", 5):
            assert error_of(await setup.complete("Hi", request_id=bad), 400)["param"] == "request_id"

    run(gateway(answering()), scenario)


def test_load_counts_requests_in_flight_and_ping_answers() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.client.get("/load")).json() == {"server_load": 0}
        running = asyncio.create_task(setup.complete("Hi"))
        await eventually(lambda: bool(setup.nodes[0].submitted))
        assert (await setup.client.get("/load")).json() == {"server_load": 1}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for method in ("GET", "POST"):
            assert (await setup.client.request(method, "/ping")).status_code == 200

    run(gateway(answering(hang_after=1)), scenario)
