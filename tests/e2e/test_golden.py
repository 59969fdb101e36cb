"""The cluster's greedy text equals what `transformers` generates in float32, streamed and not, for 24 prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.cluster import ANSWER_TIMEOUT_S, Gateway, Node, cluster
from tests.e2e.prompts import Prompt, all_prompts
from tests.kernels.rows import threads

NUM_TOKENS = 64
MAX_PADDED = 100
"""Longest prompt that shares a padded batch."""


@dataclass(frozen=True)
class Golden:
    prompt: Prompt
    text: str
    num_tokens: int


@pytest.fixture(scope="module")
def golden(smollm2: Path) -> list[Golden]:
    """`model.generate` for each prompt, with the library's own cache and attention; short prompts as one batch."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    prompts, rows = all_prompts(smollm2), []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt.chat}]
        template = tokenizer.apply_chat_template
        rows.append(
            list(prompt.token_ids)
            if prompt.chat is None
            else template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        )
    short = [i for i, ids in enumerate(rows) if len(ids) <= MAX_PADDED]
    made = dict(zip(short, _generate(model, tokenizer, [rows[i] for i in short]), strict=True))
    for i in sorted(set(range(len(rows))) - set(short)):
        [made[i]] = _generate(model, tokenizer, [rows[i]])
    return [
        Golden(prompt, tokenizer.decode(made[i], skip_special_tokens=True), len(made[i]))
        for i, prompt in enumerate(prompts)
    ]


def _generate(model: Any, tokenizer: Any, rows: list[list[int]]) -> list[list[int]]:
    """The new tokens of each row, up to and with the end of the text."""
    batch = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
    with torch.inference_mode(), threads(1):  # beside anything else that runs, two are much slower than one
        out = model.generate(**batch, max_new_tokens=NUM_TOKENS, do_sample=False)
    made = []
    for row in out[:, batch["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        made.append(row[:end])
    return made


@pytest.fixture(scope="module")
def gateway(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with cluster(tmp_path_factory.mktemp("golden"), str(smollm2)) as nodes:
        starting = [nodes.start_node(role, wait=False) for role in ("prefill", "decode")]
        for node in starting:
            nodes.wait_node(node)
        yield nodes.start_gateway("--queue-timeout", str(ANSWER_TIMEOUT_S))
        assert starting[1].metric("kvferry:transfer_blocks_total") > 0, "no block crossed: this was not a split"
        for node in starting:
            assert isinstance(node, Node)
            accounts = node.record().load.accounts
            assert accounts.available == accounts.total, accounts


def _body(prompt: Prompt, stream: bool) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {"model": "test", "max_tokens": NUM_TOKENS, "temperature": 0, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    if prompt.chat is not None:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt.chat}]}
    return "/v1/completions", body | {"prompt": list(prompt.token_ids)}


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    return str(choice.get("text") or part.get("content") or "")


async def _ask(client: httpx.AsyncClient, prompt: Prompt, stream: bool) -> tuple[str, int]:
    path, body = _body(prompt, stream)
    if not stream:
        reply = (await client.post(path, json=body)).raise_for_status().json()
        return _text(reply["choices"][0]), reply["usage"]["completion_tokens"]
    text, count = "", -1
    async with client.stream("POST", path, json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                text += "".join(_text(choice) for choice in event["choices"])
                count = (event.get("usage") or {}).get("completion_tokens", count)
    return text, count


async def _ask_all(url: str, prompts: list[Prompt], stream: bool) -> list[tuple[str, int]]:
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_TIMEOUT_S) as client:
        return list(await asyncio.gather(*(_ask(client, prompt, stream) for prompt in prompts)))


@pytest.mark.e2e
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_greedy_text_equals_transformers(gateway: Gateway, golden: list[Golden], stream: bool) -> None:
    answers = asyncio.run(_ask_all(gateway.url, [g.prompt for g in golden], stream))
    assert len(answers) == 24
    for want, (text, num_tokens) in zip(golden, answers, strict=True):
        assert text == want.text, want.prompt.name
        assert num_tokens == want.num_tokens, want.prompt.name
