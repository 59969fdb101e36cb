"""Sampling fields on their way to the nodes: the model's defaults, bad words, truncation, and the prompt echoed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.common.errors import BadRequest, ContextTooLong, ModelLoadError
from kvferry.common.requests import TokenLogprobs
from kvferry.services.gateway.generation_config import GenerationConfig
from kvferry.services.gateway.intake import Intake, Job
from kvferry.services.gateway.openai import ChatRequest, CompletionRequest
from kvferry.services.gateway.prompt_text import PromptText, align
from tests.gateway import harness
from tests.gateway.fake_decode import FakeDecode
from tests.gateway.tiny_tokenizer import tiny_tokenizer

DEFAULTS = GenerationConfig(temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, repetition_penalty=1.2)


def job(*, defaults: GenerationConfig | None = None, limit: int = 100, **fields: Any) -> Job:
    table: Any = SimpleNamespace(max_model_len=limit)
    intake = Intake(tiny_tokenizer(), table, "tiny", defaults)
    if "messages" in fields:
        chat = ChatRequest.parse(json.dumps(fields).encode())
        return asyncio.run(intake.chat(chat, "id", "id"))
    body = CompletionRequest.parse(json.dumps({"prompt": "Hello world"} | fields).encode())
    return asyncio.run(intake.completion(body, "id", "id"))


# The model's generation_config.json


def test_the_models_defaults_stand_in_for_what_the_client_does_not_say() -> None:
    params = job(defaults=DEFAULTS).prompts[0].sampling
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 7, 0.8, 0.1)
    assert params.repetition_penalty == 1.2
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    assert job(defaults=DEFAULTS, **given, seed=1).prompts[0].sampling == job(seed=1).prompts[0].sampling
    assert job(defaults=DEFAULTS, temperature=None).prompts[0].sampling.temperature == 0.5


def test_max_new_tokens_of_the_model_caps_what_is_asked_for() -> None:
    capped = GenerationConfig(max_new_tokens=9)
    for fields, expected in (({}, 9), ({"max_tokens": 50}, 9), ({"max_tokens": 3}, 3)):
        assert job(defaults=capped, **fields).prompts[0].sampling.max_tokens == expected
    chat = job(defaults=capped, messages=[{"role": "user", "content": "hi"}])
    assert chat.prompts[0].sampling.max_tokens == 9


def test_the_file_is_read_as_exporters_write_it(tmp_path: Path) -> None:
    assert GenerationConfig.load(tmp_path) == GenerationConfig()
    path = tmp_path / "generation_config.json"
    path.write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true, "eos_token_id": [1, 2]}')
    assert GenerationConfig.load(tmp_path) == GenerationConfig(temperature=0.6, top_k=20)


@pytest.mark.parametrize("text", ['{"temperature": -1}', '{"top_p": 0}', '{"repetition_penalty": "x"}', "{", "[]"])
def test_a_file_that_makes_no_sense_is_named_with_the_way_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json.*--generation-config vllm"):
        GenerationConfig.load(tmp_path)


# Lists of tokens and words


def test_bad_words_are_spelled_with_and_without_a_space_before() -> None:
    encode = tiny_tokenizer().encode
    words = job(bad_words=["quick brown", " lazy"]).prompts[0].sampling.bad_words
    assert words == tuple(tuple(encode(text)) for text in ("quick brown", " quick brown", "lazy", " lazy"))


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("token_id", [512, -1])
def test_token_ids_outside_the_vocabulary_are_refused(field: str, token_id: int) -> None:
    with pytest.raises(BadRequest, match=r"\[0, 512\)") as caught:
        job(**{field: [3, token_id]})
    assert caught.value.param == field


def test_a_node_gets_every_field() -> None:
    node = FakeDecode()

    async def scenario(setup: harness.Setup) -> None:
        fields = {"allowed_token_ids": [5, 6, 5], "bad_words": ["dog"], "prompt_logprobs": None, "priority": -4}
        assert (await setup.complete("Hello", **fields)).status_code == 200
        (request,) = node.submitted
        assert request.priority == -4
        assert request.sampling.allowed_token_ids == (5, 6)
        assert request.sampling.bad_words == tuple(tuple(tiny_tokenizer().encode(t)) for t in ("dog", " dog"))

    harness.run(harness.gateway(node), scenario)


# Truncation


def test_the_last_tokens_of_a_prompt_are_kept() -> None:
    ids = list(range(10, 60))
    assert job(prompt=ids, truncate_prompt_tokens=3).prompts[0].token_ids == (57, 58, 59)
    assert len(job(prompt=ids, truncate_prompt_tokens=99).prompts[0].token_ids) == 50
    assert len(job(prompt=ids * 9, truncate_prompt_tokens=-1, max_tokens=30).prompts[0].token_ids) == 70
    assert len(job(prompt=ids * 9, truncate_prompt_tokens=-1).prompts[0].token_ids) == 99
    assert job(prompt="Hello " * 9000, truncate_prompt_tokens=5).prompts[0].sampling.max_tokens == 16
    with pytest.raises(BadRequest, match="1 to 100"):
        job(prompt=ids, truncate_prompt_tokens=101)
    with pytest.raises(ContextTooLong):
        job(prompt=ids * 9)


# The prompt, shown


@pytest.mark.parametrize("text", ["The quick brown fox", "naïve café 日本語 🙂", "<|im_start|>user", " a", ""])
def test_offsets_point_at_the_tokens_of_a_text(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = [1, *tokenizer.encode(text)]  # as if the tokenizer put a token of its own before the text
    shown, offsets = align(tokenizer, ids, text, skip_special_tokens=True)
    assert shown == text
    assert len(offsets) == len(ids)
    for token_id, offset in zip(ids[1:], offsets[1:], strict=True):
        piece = tokenizer.token_bytes(token_id).decode(errors="ignore")
        assert text.startswith(piece, offset)


def test_a_prompt_of_token_ids_is_shown_as_a_completion_would_be() -> None:
    tokenizer = tiny_tokenizer()
    ids = [1, *tokenizer.encode("Hello world")]
    assert align(tokenizer, ids, None, skip_special_tokens=True)[0] == "Hello world"
    assert align(tokenizer, ids, None, skip_special_tokens=False)[0] == "<|im_start|>Hello world"


def test_what_is_shown_before_a_choice() -> None:
    entries = (TokenLogprobs(-1.0, ((9, -0.5),), 2), TokenLogprobs(-2.0))
    both = PromptText((5, 6, 7), "abc", (0, 1, 2), echo=True, logprobs=True, prompt_logprobs=True).opening(entries)
    assert both.text == "abc"
    assert [(e.token_id, e.offset, e.logprobs) for e in both.entries] == [
        (5, 0, None),
        (6, 1, entries[0]),
        (7, 2, entries[1]),
    ]
    assert both.prompt == both.entries
    only_text = PromptText((5, 6), "ab", (0, 1), echo=True, logprobs=False, prompt_logprobs=False).opening(())
    assert (only_text.text, only_text.entries, only_text.prompt) == ("ab", [], [])
    not_echoed = PromptText((5,), "a", (0,), echo=False, logprobs=False, prompt_logprobs=True)
    assert (not_echoed.num_chars, not_echoed.opening(()).text) == (0, "")


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_stands_before_every_choice_once(stream: bool) -> None:
    async def scenario(setup: harness.Setup) -> None:
        reply = await setup.complete(["Hello", "The dog"], echo=True, n=2, max_tokens=4, stream=stream, stop=["lazy"])
        assert reply.status_code == 200, reply.text
        if stream:
            texts = [harness.text_of(harness.events(reply.text), index) for index in range(4)]
        else:
            texts = [choice["text"] for choice in reply.json()["choices"]]
        assert [text[:5] for text in texts] == ["Hello", "Hello", "The d", "The d"]
        assert all(len(text) > 5 for text in texts)
        assert "Hello" not in texts[0][1:4]

    harness.run(harness.gateway(FakeDecode()), scenario)


def test_only_the_prompt_is_echoed_when_no_token_is_asked_for() -> None:
    async def scenario(setup: harness.Setup) -> None:
        reply = (await setup.complete("Hello", echo=True, max_tokens=0)).json()
        assert reply["choices"][0]["text"] == "Hello"
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == 0

    harness.run(harness.gateway(FakeDecode()), scenario)
