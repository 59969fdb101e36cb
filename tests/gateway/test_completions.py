"""The answers as clients parse them: both endpoints, whole and streamed, through a real session with a fake node."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from kvferry.common.requests import GenerateRequest
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, events, eventually, gateway, run, text_of
from tests.gateway.tiny_tokenizer import IM_END, tiny_tokenizer

EMOJI = "naïve 🧑‍🚀 日本語 தமிழ்"


def saying(text: str, **how: Any) -> FakeDecode:
    """A node that answers with this text, whatever it is asked."""
    return FakeDecode(
        Behaviour(tokens=lambda request, index: tiny_tokenizer().encode(text), stop_token_id=IM_END, **how)
    )


def test_a_completion_whole() -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.complete("Hello world", max_tokens=100)
        assert response.status_code == 200
        body = response.json()
        ids = tiny_tokenizer().encode(EMOJI)
        prompt = tiny_tokenizer().encode("Hello world")
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        assert body["model"] == "tiny"
        assert body["choices"] == [
            {
                "index": 0,
                "text": EMOJI,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ]
        assert body["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids) + 1,
            "total_tokens": len(prompt) + len(ids) + 1,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        submitted = setup.nodes[0].submitted[0]
        assert list(submitted.prompt_token_ids) == prompt
        assert submitted.sampling.max_tokens == 100

    run(gateway(saying(EMOJI, cached_tokens=3)), scenario)


def test_a_chat_whole() -> None:
    async def scenario(setup: Setup) -> None:
        body = (await setup.chat("Hi")).json()
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
        assert body["choices"][0]["finish_reason"] == "stop"
        submitted = setup.nodes[0].submitted[0]
        prompt = tiny_tokenizer().decode(submitted.prompt_token_ids)
        assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert submitted.sampling.max_tokens == 512 - len(submitted.prompt_token_ids), "the rest of the context"

    run(gateway(saying("Hello")), scenario)


@pytest.mark.parametrize("how", [{}, {"tokens_per_step": 3}, {"step_s": 0.001}])
def test_streamed_pieces_join_to_the_whole(how: dict[str, Any]) -> None:
    async def scenario(setup: Setup) -> None:
        for ask in (setup.complete, setup.chat):
            response = await ask("Hi", max_tokens=100, stream=True)
            assert response.headers["content-type"].startswith("text/event-stream")
            stream = events(response.text)
            assert text_of(stream) == EMOJI
            assert len({event["id"] for event in stream}) == 1
            assert all(event["choices"] for event in stream)
            finished = [event["choices"][0]["finish_reason"] for event in stream]
            assert finished == [None] * (len(stream) - 1) + ["stop"]

    run(gateway(saying(EMOJI, **how)), scenario)


def test_a_chat_stream_opens_with_the_role_and_has_one_event_per_token() -> None:
    async def scenario(setup: Setup) -> None:
        stream = events((await setup.chat("Hi", stream=True)).text)
        assert [event["object"] for event in stream] == ["chat.completion.chunk"] * len(stream)
        assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        ids = tiny_tokenizer().encode("Hello world")
        contents = [event["choices"][0]["delta"].get("content") for event in stream[1:]]
        assert contents == [*(tiny_tokenizer().token_text(token_id) for token_id in ids), None]

    run(gateway(saying("Hello world", step_s=0.005)), scenario)


def test_usage_of_a_stream_comes_last_and_only_when_asked_for() -> None:
    async def scenario(setup: Setup) -> None:
        for ask in (setup.complete, setup.chat):
            whole = (await ask("Hi", max_tokens=100)).json()["usage"]
            asked = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 100}
            stream = events((await ask("Hi", **asked)).text)
            assert stream[-1]["choices"] == []
            assert stream[-1]["usage"] == whole
            assert all(event["usage"] is None for event in stream[:-1])
            plain = events((await ask("Hi", max_tokens=100, stream=True)).text)
            assert not any("usage" in event for event in plain)

    run(gateway(saying("Hello")), scenario)


def test_usage_in_every_event() -> None:
    async def scenario(setup: Setup) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = events((await setup.complete("Hi", stream=True, stream_options=options)).text)
        counts = [event["usage"]["completion_tokens"] for event in stream]
        assert counts == sorted(counts)
        assert counts[0] == 1

    run(gateway(saying("Hello", step_s=0.005)), scenario)


def test_several_prompts_and_samples_have_the_indexes_of_openai() -> None:
    def tokens(request: GenerateRequest, index: int) -> list[int]:
        return [*request.prompt_token_ids, *tiny_tokenizer().encode(str(index))]

    async def scenario(setup: Setup) -> None:
        fields: dict[str, Any] = {"prompt": ["The ", "quick ", "fox "], "n": 2, "max_tokens": 50}
        body = (await setup.complete(**fields)).json()
        assert [choice["index"] for choice in body["choices"]] == list(range(6))
        texts = [choice["text"] for choice in body["choices"]]
        assert texts == ["The 0", "The 1", "quick 0", "quick 1", "fox 0", "fox 1"]
        prompts = [tiny_tokenizer().encode(prompt) for prompt in fields["prompt"]]
        assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
        stream = events((await setup.complete(**fields, stream=True)).text)
        assert [text_of(stream, index) for index in range(6)] == texts
        ids = (await setup.complete([[20, 21], [22, 23, 24]], max_tokens=1)).json()
        assert ids["usage"]["prompt_tokens"] == 5

    run(gateway(FakeDecode(Behaviour(tokens=tokens, stop_token_id=IM_END))), scenario)


def test_a_seed_is_drawn_per_prompt_where_none_is_given() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.complete(["a", "a"], max_tokens=1)
        await setup.complete(["a", "a"], max_tokens=1, seed=7)
        seeds = [request.sampling.seed for request in setup.nodes[0].submitted]
        assert len(set(seeds[:2])) == 2
        assert seeds[2:] == [7, 7]

    run(gateway(FakeDecode()), scenario)


def test_chat_logprobs() -> None:
    async def scenario(setup: Setup) -> None:
        ids = [*tiny_tokenizer().encode("é🙂"), IM_END]
        for asked, k in (({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 2}, 2)):
            choice = (await setup.chat("Hi", **asked)).json()["choices"][0]
            content = choice["logprobs"]["content"]
            assert [entry["bytes"] for entry in content] == [list(tiny_tokenizer().token_bytes(i)) for i in ids]
            assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == choice["message"]["content"]
            assert all(entry["logprob"] == -0.5 for entry in content)
            assert [len(entry["top_logprobs"]) for entry in content] == [k] * len(ids)
            stream = events((await setup.chat("Hi", stream=True, **asked)).text)
            streamed = [e for event in stream for e in (event["choices"][0]["logprobs"] or {"content": []})["content"]]
            assert streamed == content
        assert (await setup.chat("Hi")).json()["choices"][0]["logprobs"] is None

    run(gateway(saying("é🙂")), scenario)


def test_completion_logprobs() -> None:
    async def scenario(setup: Setup) -> None:
        for k in (0, 3):
            logprobs = (await setup.complete("Hi", logprobs=k, max_tokens=6)).json()["choices"][0]["logprobs"]
            assert len({len(values) for values in logprobs.values()}) == 1
            assert logprobs["text_offset"][0] == 0
            assert [len(top) for top in logprobs["top_logprobs"]] == [max(k, 1)] * len(logprobs["tokens"])
        assert (await setup.complete("Hi")).json()["choices"][0]["logprobs"] is None
        half = tiny_tokenizer().encode("é🙂")
        tokens = (await setup.complete("Hi", logprobs=0, max_tokens=50)).json()["choices"][0]["logprobs"]["tokens"]
        assert len(tokens) == len(half) + 1
        assert any(token.startswith("bytes:\\x") for token in tokens)

    run(gateway(saying("é🙂")), scenario)


def test_a_stop_string_ends_the_choice_and_tells_the_node() -> None:
    async def scenario(setup: Setup) -> None:
        node = setup.nodes[0]
        fields: dict[str, Any] = {"prompt": "Hi", "n": 2, "max_tokens": 100, "stop": ["brown", "own"]}
        body = (await setup.complete(**fields)).json()
        assert [choice["text"] for choice in body["choices"]] == ["The quick ", "The quick "]
        assert [choice["finish_reason"] for choice in body["choices"]] == ["stop", "stop"]
        assert body["choices"][0]["stop_reason"] == "brown"
        await eventually(lambda: len(node.cancelled) == 2)
        assert sorted(indexes for _, _, indexes in node.cancelled) == [(), (0,)], "one choice, then all that was left"
        stream = events((await setup.complete(**fields, stream=True)).text)
        assert text_of(stream, 0) == text_of(stream, 1) == "The quick "
        included = await setup.complete(**fields, include_stop_str_in_output=True)
        assert included.json()["choices"][0]["text"] == "The quick brown"

    run(gateway(saying("The quick brown fox jumps over the lazy dog", step_s=0.002)), scenario)


def test_24_requests_at_once_get_their_own_answers() -> None:
    async def scenario(setup: Setup) -> None:
        prompts = [f"{number}: The quick brown fox" for number in range(24)]
        length = len(tiny_tokenizer().encode(prompts[0])) * 2
        answers = await asyncio.gather(*(setup.complete(prompt, max_tokens=length, stream=True) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert text_of(events(answer.text)).startswith(prompt)

    run(gateway(FakeDecode(Behaviour(step_s=0.001)), FakeDecode(Behaviour(step_s=0.001), node_id="d1")), scenario)


def test_the_official_client_parses_it_all() -> None:
    async def scenario(setup: Setup) -> None:
        client = openai.AsyncOpenAI(base_url=f"{setup.client.base_url}/v1", api_key="none", max_retries=0)
        async with client:
            chat = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2
            )
            assert chat.choices[0].message.content == "Hello"
            assert chat.choices[0].logprobs is not None
            assert chat.usage is not None
            parts = ""
            stream = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "Hi"}], stream=True
            )
            async for chunk in stream:
                parts += chunk.choices[0].delta.content or ""
            assert parts == "Hello"
            completion = await client.completions.create(model="tiny", prompt="Hi", logprobs=2)
            assert completion.choices[0].text == "Hello"
            with pytest.raises(openai.BadRequestError) as bad:
                await client.completions.create(model="tiny", prompt="Hi", temperature=-1)
            assert bad.value.param == "temperature"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("other")
            assert [model.id async for model in client.models.list()] == ["tiny"]

    run(gateway(saying("Hello"), over_port=True), scenario)
