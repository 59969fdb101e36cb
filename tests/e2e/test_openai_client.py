"""The official `openai` client, sync and async, against a whole cluster: what its users do, with its own types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.cluster import cluster

HELLO: Any = [{"role": "user", "content": "Say hello to the ferry. " * 4}]
LOOKUP: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up a port.",
        "parameters": {
            "type": "object",
            "properties": {"port": {"enum": ["Calais", "Dover"]}, "boats": {"type": "integer", "maximum": 9}},
            "required": ["port", "boats"],
            "additionalProperties": False,
        },
    },
}


class Ferry(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["car", "train"]


@pytest.fixture(scope="module")
def url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One prefill and one decode node; the tiny model's words are random, so what has a form has it by force."""
    with cluster(tmp_path_factory.mktemp("clients"), str(tiny_model)) as nodes:
        prefill = nodes.start_node("prefill", wait=False)
        nodes.start_node("decode", "--local-prefill-max-tokens", "0")
        nodes.wait_node(prefill)
        yield nodes.start_gateway("--tool-call-parser", "hermes").url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_chats_whole_and_streamed_are_the_same_text(client: openai.OpenAI) -> None:
    fields: Any = {"model": "test", "messages": HELLO, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_log_probabilities_of_chats_and_completions(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="test", messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True}
    )
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content
    assert entries is not None
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 5
    text = client.completions.create(
        model="test", prompt="A ferry", max_tokens=5, logprobs=2, echo=True, extra_body={"ignore_eos": True}
    ).choices[0]
    assert text.logprobs is not None
    assert text.logprobs.tokens is not None
    assert text.logprobs.text_offset is not None
    assert "".join(text.logprobs.tokens[:-5]) == "A ferry"
    assert text.logprobs.text_offset[0] == 0


def test_structured_output_is_parsed_into_the_callers_type(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="test", messages=HELLO, response_format=Ferry, max_tokens=300, seed=1
    ).choices[0]
    assert parsed.finish_reason == "stop"
    assert isinstance(parsed.message.parsed, Ferry)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lookup"}}])
def test_a_call_that_is_demanded_is_made_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    fields: Any = {"model": "test", "messages": HELLO, "tools": [LOOKUP], "tool_choice": choice}
    fields |= {"parallel_tool_calls": False, "max_tokens": 300, "seed": 1}
    whole = client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    for made in (whole, final):
        assert made.finish_reason == "tool_calls"
        assert made.message.tool_calls is not None
        (call,) = made.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "lookup"
        assert json.loads(call.function.arguments)["port"] in ("Calais", "Dover")
    result = {"role": "tool", "tool_call_id": "x", "content": "no boats"}
    answer = [*HELLO, whole.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(model="test", messages=answer, tools=[LOOKUP], max_tokens=3)
    assert after.choices[0].finish_reason in ("stop", "length")


def test_async_streams_side_by_side(url: str) -> None:
    async def text(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.completions.create(
            model="test", prompt=f"Ferry {number} ", max_tokens=8, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            together = await asyncio.gather(*(text(client, number) for number in range(6)))
            assert together == [await text(client, number) for number in range(6)]

    asyncio.run(scenario())


def test_errors_are_the_clients_own_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="test", messages=HELLO, temperature=9e9, top_p=5)
    assert caught.value.param == "top_p"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="test", input="x")
