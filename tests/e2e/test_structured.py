"""Structured output through a whole cluster: valid, streamed or not, and the same text split or whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.common.requests import GenerateRequest, SamplingParams
from kvferry.services.gateway.structured import StructuredOutputs, compile_structured
from tests.e2e.cluster import Cluster, DecodeClient, Gateway, Node, cluster

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "colour", "sizes"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Describe the thing on the ferry. " * 12}]


@pytest.fixture(scope="module")
def clusters(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Cluster]]:
    """`split`: 1 prefill + 1 decode, every prompt prefilled remotely; `whole`: one `both` node. A gateway each."""
    with (
        cluster(tmp_path_factory.mktemp("split"), str(tiny_model)) as split,
        cluster(tmp_path_factory.mktemp("whole"), str(tiny_model)) as whole,
    ):
        nodes = [
            (split, split.start_node("prefill", wait=False)),
            (split, split.start_node("decode", "--local-prefill-max-tokens", "0", wait=False)),
            (whole, whole.start_node("both", wait=False)),
        ]
        for made, node in nodes:
            made.wait_node(node)
        split.start_gateway()
        whole.start_gateway()
        yield {"split": split, "whole": whole}


def _post(nodes: Cluster, **fields: Any) -> httpx.Response:
    (gateway,) = (process for process in nodes.processes if isinstance(process, Gateway))
    body = {"model": "test", "messages": MESSAGES, "max_tokens": 800, "response_format": FORMAT} | fields
    return httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)


def _whole(nodes: Cluster, **fields: Any) -> list[str]:
    reply = _post(nodes, **fields)
    assert reply.status_code == 200, reply.text
    choices = sorted(reply.json()["choices"], key=lambda choice: int(choice["index"]))
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [choice["message"]["content"] for choice in choices]


def _streamed(nodes: Cluster, **fields: Any) -> str:
    reply = _post(nodes, stream=True, **fields)
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _check(text: str) -> None:
    thing = json.loads(text)
    assert list(thing) == ["name", "colour", "sizes"]
    assert len(thing["name"]) <= 8
    assert thing["colour"] in ("red", "green", "blue")
    assert len(thing["sizes"]) <= 3
    assert all(0 <= size <= 99 for size in thing["sizes"])


@pytest.mark.parametrize(("temperature", "seed"), [(0.0, 0), (1.0, 0), (1.0, 1)])
def test_the_schema_holds_and_split_equals_whole(clusters: dict[str, Cluster], temperature: float, seed: int) -> None:
    fields = {"temperature": temperature, "seed": seed}
    (text,) = _whole(clusters["split"], **fields)
    _check(text)
    assert _whole(clusters["whole"], **fields) == [text]
    assert _streamed(clusters["split"], **fields) == text
    decode = next(p for p in clusters["split"].processes if isinstance(p, Node) and p.name == "decode")
    assert decode.metric("kvferry:transfer_blocks_total") > 0, "nothing was prefilled remotely: this tests too little"


def test_several_samples_each_hold_to_the_schema(clusters: dict[str, Cluster]) -> None:
    texts = _whole(clusters["split"], n=3, seed=5)
    assert len(set(texts)) > 1
    for text in texts:
        _check(text)
    assert _whole(clusters["whole"], n=3, seed=5) == texts


@pytest.mark.parametrize("stream", [False, True])
def test_what_only_a_node_can_refuse_is_a_400_too(clusters: dict[str, Cluster], stream: bool) -> None:
    """A special token that the model's tokenizer does not have."""
    constraint = {"response_format": None, "structured_outputs": {"grammar": 'start: "a" <|nope|>'}}
    for nodes in clusters.values():
        reply = _post(nodes, stream=stream, **constraint)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "structured_outputs.grammar"
        assert "unknown special token" in reply.json()["error"]["message"]


def test_a_request_that_is_cancelled_while_its_grammar_compiles_never_runs(clusters: dict[str, Cluster]) -> None:
    (node,) = (process for process in clusters["whole"].processes if isinstance(process, Node))
    properties = {f"p{i}": SCHEMA for i in range(300)}
    slow = compile_structured(None, StructuredOutputs.model_validate({"json": {"properties": properties}}))
    request = GenerateRequest("slow", (5, 6, 7), SamplingParams(max_tokens=500, structured=slow), n=2)

    async def leave() -> None:
        async with DecodeClient(node) as client:
            await client.submit(request)
            await client.cancel(request.request_id)
            again = replace(request, attempt=1, sampling=SamplingParams(max_tokens=2), n=1)
            assert (await client.generate(again)).finish_reason == "length"

    asyncio.run(leave())
    assert node.metric("kvferry:request_success_total", finished_reason="abort") == 2


def test_afterwards_no_block_is_owned_by_anybody(clusters: dict[str, Cluster]) -> None:
    for nodes in clusters.values():
        for node in (process for process in nodes.processes if isinstance(process, Node)):
            accounts = node.record().load.accounts
            assert accounts.available == accounts.total, f"{node.name}: {accounts}"
