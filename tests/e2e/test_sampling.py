"""Every sampling parameter through gateway, prefill node and decode node gives what a lone sequence gives."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kvferry.common.requests import SamplingParams
from kvferry.services.gateway.text import Detokenizer
from kvferry.services.gateway.tokenizer import Tokenizer
from tests.e2e.alone import Alone
from tests.e2e.cluster import Cluster, Gateway, Node, cluster

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 11}
CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filters": DRAWN | {"top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": GREEDY | {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "logit_bias": DRAWN | {"logit_bias": {"70": 3.5, "90": -100}},
    "allowed_token_ids": DRAWN | {"allowed_token_ids": list(range(40, 120, 3))},
    "stop_token_ids": DRAWN | {"stop_token_ids": list(range(100, 180)), "min_tokens": 4},
    "min_tokens": DRAWN | {"ignore_eos": False, "min_tokens": 6, "logit_bias": {"2": 30}},
}


class Split:
    """1 prefill + 1 decode + gateway with the tiny model, under the priority policy."""

    def __init__(self, nodes: Cluster, prefill: Node, decode: Node, gateway: Gateway, folder: Path) -> None:
        self.nodes, self.prefill, self.decode, self.gateway = nodes, prefill, decode, gateway
        self.alone = Alone.load(folder)
        self.tokenizer = Tokenizer.load(folder)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        reply = httpx.post(f"{self.gateway.url}/v1/completions", json=_body(prompt, fields), timeout=60)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def refused(self, **fields: Any) -> dict[str, Any]:
        reply = httpx.post(f"{self.gateway.url}/v1/completions", json=_body("hi", fields), timeout=60)
        assert reply.status_code == 400, reply.text
        error: dict[str, Any] = reply.json()["error"]
        return error

    def text(self, token_ids: list[int]) -> str:
        detokenizer = Detokenizer(self.tokenizer)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()


def _body(prompt: Any, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "test", "prompt": prompt, "max_tokens": 24, "ignore_eos": True} | fields


def _params(fields: dict[str, Any]) -> SamplingParams:
    biases = tuple((int(token), bias) for token, bias in fields.get("logit_bias", {}).items())
    lists = {name: tuple(fields.get(name, ())) for name in ("allowed_token_ids", "stop_token_ids")}
    return SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | fields | lists | {"logit_bias": biases}))


def _ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=count)


@pytest.fixture(scope="module")
def split(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    with cluster(tmp_path_factory.mktemp("sampling"), str(tiny_model)) as nodes:
        policy = ("--scheduling-policy", "priority")
        prefill = nodes.start_node("prefill", *policy, wait=False)
        decode = nodes.start_node("decode", *policy, "--local-prefill-max-tokens", "16", wait=False)
        nodes.wait_node(prefill)
        nodes.wait_node(decode)
        yield Split(nodes, prefill, decode, nodes.start_gateway(), tiny_model)


def test_each_parameter_all_at_once_gives_what_each_gives_alone(split: Split) -> None:
    prompts = {name: _ids(i, 30 + 29 * i) for i, name in enumerate(CASES)}

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            url = f"{split.gateway.url}/v1/completions"
            bodies = [_body(prompts[name], fields | {"logprobs": 2}) for name, fields in CASES.items()]
            return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    for (name, fields), reply in zip(CASES.items(), asyncio.run(run()), strict=True):
        assert reply.status_code == 200, (name, reply.text)
        choice = reply.json()["choices"][0]
        want = split.alone.generate(prompts[name], _params(fields | {"logprobs": 2}))
        ids = [token.token_id for token in want]
        shown = ids[:-1] if ids[-1] in fields.get("stop_token_ids", ()) else ids
        assert choice["text"] == split.text(shown), name
        assert choice["logprobs"]["token_logprobs"] == [token.logprob for token in want], name


def test_allowed_and_stop_tokens_do_what_they_say(split: Split) -> None:
    allowed = CASES["allowed_token_ids"]["allowed_token_ids"]
    answer = split.complete(_ids(3, 60), **CASES["allowed_token_ids"], logprobs=0)
    names = {split.tokenizer.token_text(token) for token in allowed}
    assert set(answer["choices"][0]["text"]) <= set("".join(names))
    stopped = split.complete(_ids(3, 60), **CASES["stop_token_ids"])["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] in range(100, 180)


def test_a_bad_word_of_several_tokens_does_not_appear(split: Split) -> None:
    prompt, greedy = _ids(8, 80), SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0)
    free = [token.token_id for token in split.alone.generate(prompt, greedy)]
    pairs = itertools.pairwise(free)
    word = next(word for pair in pairs if _is_word(split, word := split.text([*pair]), pair))
    spelled = {tuple(split.tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")}
    want = split.alone.generate(prompt, replace(greedy, bad_words=tuple(spelled)))
    ids = [token.token_id for token in want]
    answer = split.complete(prompt, temperature=0.0, max_tokens=60, bad_words=[word])
    assert answer["choices"][0]["text"] == split.text(ids) != split.text(free)
    for banned in spelled:
        assert all(tuple(ids[i : i + len(banned)]) != banned for i in range(len(ids)))


def _is_word(split: Split, word: str, pair: tuple[int, int]) -> bool:
    """Whether a client who bans this word bans these two tokens."""
    stripped = word.lstrip()
    spelled = [split.tokenizer.encode(prefix + stripped, add_special_tokens=False) for prefix in ("", " ")]
    return bool(stripped) and [*pair] in spelled


def test_prompt_logprobs_are_those_of_a_lone_prompt_and_ignore_the_cache(split: Split) -> None:
    prompt = _ids(21, 700)
    want = split.alone.prompt_logprobs(prompt, 3)
    split.complete(prompt, max_tokens=1)  # now cached on both nodes
    for n in (1, 3):
        answer = split.complete(prompt, prompt_logprobs=3, max_tokens=2, n=n)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice in answer["choices"]:
            first, *rest = choice["prompt_logprobs"]
            assert first is None
            for token_id, got, entry in zip(prompt[1:], rest, want, strict=True):
                own = got[str(token_id)]
                assert (own["logprob"], own["rank"]) == (entry.logprob, entry.rank)
                assert own["decoded_token"] == split.tokenizer.token_text(token_id)
                assert {int(k): v["logprob"] for k, v in got.items()} == dict(entry.top) | {token_id: entry.logprob}
    assert split.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 688


@pytest.mark.parametrize("text", ["The night ferry", "東京 🙂 naïve", "<|im_start|>user\nhi<|im_end|>\n"])
def test_echo_with_logprobs_gives_one_list_over_prompt_and_completion(split: Split, text: str) -> None:
    choice = split.complete(text, echo=True, logprobs=1, temperature=0.0, max_tokens=5)["choices"][0]
    plain = split.complete(text, temperature=0.0, max_tokens=5)["choices"][0]
    assert choice["text"] == text + plain["text"]
    lists = choice["logprobs"]
    ids = split.tokenizer.encode(text)
    assert {len(lists[key]) for key in lists} == {len(ids) + 5}
    assert lists["token_logprobs"][0] is None
    assert lists["top_logprobs"][0] is None
    want = split.alone.prompt_logprobs(ids, 1)
    assert lists["token_logprobs"][1 : len(ids)] == [entry.logprob for entry in want]
    assert lists["text_offset"] == sorted(lists["text_offset"])
    assert lists["text_offset"][0] == 0
    assert lists["text_offset"][len(ids)] == len(text)
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"].startswith(token, offset)


def test_echo_of_token_ids_alone_and_streamed(split: Split) -> None:
    prompt = _ids(5, 40)
    text = split.text(prompt)
    alone = split.complete(prompt, echo=True, max_tokens=0)
    assert alone["choices"][0]["text"] == text
    assert alone["choices"][0]["finish_reason"] == "length"
    assert alone["usage"]["completion_tokens"] == 0
    whole = split.complete(prompt, echo=True, temperature=0.0, n=2)
    body = _body(prompt, {"echo": True, "temperature": 0.0, "n": 2, "stream": True})
    with httpx.stream("POST", f"{split.gateway.url}/v1/completions", json=body, timeout=60) as reply:
        events = [httpx.Response(200, content=line[6:]).json() for line in reply.iter_lines() if "{" in line]
    for index in (0, 1):
        got = "".join(c["text"] for e in events for c in e["choices"] if c["index"] == index)
        assert got == whole["choices"][index]["text"]
        assert got.startswith(text)


def test_a_truncated_prompt_is_its_end(split: Split) -> None:
    prompt = _ids(6, 90)
    kept = split.complete(prompt, temperature=0.0, truncate_prompt_tokens=33)
    assert kept["usage"]["prompt_tokens"] == 33
    assert kept["choices"][0]["text"] == split.complete(prompt[-33:], temperature=0.0)["choices"][0]["text"]
    fitted = split.complete(_ids(7, 3000), truncate_prompt_tokens=-1)
    assert fitted["usage"]["prompt_tokens"] == 2048 - 24
    assert "2048" in split.refused(truncate_prompt_tokens=2049)["message"]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"allowed_token_ids": [600]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt_logprobs": 99}, "20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"min_tokens": 30}, "24"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(split: Split, fields: dict[str, Any], names: str) -> None:
    assert names in split.refused(**fields)["message"]


def test_priorities_are_accepted_and_change_no_text(split: Split) -> None:
    prompt = _ids(9, 300)
    texts = {split.complete(prompt, temperature=0.0, priority=p)["choices"][0]["text"] for p in (-5, 0, 9)}
    assert len(texts) == 1


def test_special_tokens_are_shown_on_request(split: Split) -> None:
    fields = {"temperature": 0.0, "logit_bias": {"1": 100}, "max_tokens": 2}
    assert split.complete([5, 6], **fields)["choices"][0]["text"] == ""
    shown = split.complete([5, 6], **fields, skip_special_tokens=False)["choices"][0]["text"]
    assert shown == "<|im_start|><|im_start|>"


def test_the_models_generation_config_is_the_default_unless_it_is_switched_off(
    split: Split, tiny_model: Path, tmp_path: Path
) -> None:
    """top_k 1 in the file makes a request that says nothing greedy."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"top_k": 1}))
    prompt, greedy = _ids(12, 50), split.complete(_ids(12, 50), temperature=0.0)["choices"][0]["text"]
    texts = []
    for flags in (("auto",), ("vllm",)):
        gateway = split.nodes.start_gateway("--model", str(folder), "--generation-config", *flags)
        reply = httpx.post(
            f"{gateway.url}/v1/completions", json=_body(prompt, {"temperature": 5, "seed": 3}), timeout=60
        )
        texts.append(reply.json()["choices"][0]["text"])
        gateway.stop()
        split.nodes.processes.remove(gateway)
    assert texts[0] == greedy
    assert texts[1] == split.complete(prompt, temperature=5, seed=3)["choices"][0]["text"] != greedy


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels need Triton")
def test_no_node_loads_a_compiler_to_serve_on_a_cpu(split: Split) -> None:
    """Triton and torch's own compiler take 150 MB and a second or two, which a node's first decode step would wait."""
    for fields in CASES.values():
        split.complete("compiled or not", **fields)
    for node in (split.prefill, split.decode):
        assert "libtriton" not in Path(f"/proc/{node.pid}/maps").read_text()
