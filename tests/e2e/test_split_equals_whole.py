"""Promise 1: one prefill node + one decode node return, bit for bit, what one `both` node returns for a lone request.

Each variant is one thing that may happen around a request. Whatever is added to kvferry later must keep this green.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvferry.common.requests import GenerateRequest, PrefillCandidate, SamplingParams
from tests.e2e.cluster import Answer, Cluster, DecodeClient, Node, cluster
from tests.e2e.prompts import Prompt, all_prompts

HAS_UCX = find_spec("ucxx") is not None
REMOTE = ("--local-prefill-max-tokens", "0")


@dataclass(frozen=True)
class Variant:
    """`common`: flags of both nodes. `alone`: one request at a time. `rounds`: the whole set again, now cached.

    `n`: choices of each request, whose first must be what the request gives by itself.
    """

    name: str
    common: tuple[str, ...] = ()
    decode: tuple[str, ...] = REMOTE
    alone: bool = False
    rounds: int = 1
    num_others: int = 0
    n: int = 1
    preempted: bool = False
    split: bool = True
    transport: str = "shm"


VARIANTS = (
    Variant("alone", alone=True),
    Variant("batched"),
    Variant("prefix-hit", rounds=2),
    Variant("chunks-of-16", common=("--max-num-batched-tokens", "16")),
    Variant("chunks-of-2048", common=("--max-num-batched-tokens", "2048")),
    Variant("eight-others", num_others=8),
    Variant("thirty-two-others", num_others=32),
    Variant("copy-on-write", n=3),
    Variant("preempted", preempted=True),
    Variant("over-grpc", common=("--transports", "grpc"), transport="grpc"),
    Variant("over-ucx", common=("--transports", "ucx,grpc"), transport="ucx"),
    Variant("two-threads", common=("--num-threads", "2")),
    Variant("decode-prefills", decode=("--local-prefill-max-tokens", "100000")),
    Variant("both-batched", split=False),
    Variant("no-prefix-cache", common=("--no-enable-prefix-caching",)),
)


@dataclass(frozen=True)
class Whole:
    """What a `both` node returns for each prompt, one request at a time."""

    model: Path
    requests: list[GenerateRequest]
    answers: list[Answer]


def _requests(prompts: list[Prompt], num_tokens: int) -> list[GenerateRequest]:
    """Greedy for the even ones, seeded sampling with every filter for the odd ones; logprobs for all."""
    greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    drawn = replace(greedy, temperature=0.8, top_k=50, top_p=0.95, min_p=0.02)
    return [
        GenerateRequest(p.name, p.token_ids, replace(drawn if i % 2 else greedy, seed=i)) for i, p in enumerate(prompts)
    ]


async def _one_by_one(node: Node, requests: list[GenerateRequest]) -> list[Answer]:
    async with DecodeClient(node) as client:
        return [await client.generate(request) for request in requests]


def _whole(folder: Path, model: Path, prompts: list[Prompt], num_tokens: int) -> Whole:
    with cluster(folder, str(model)) as nodes:
        both = nodes.start_node("both")
        requests = _requests(prompts, num_tokens)
        return Whole(model, requests, asyncio.run(_one_by_one(both, requests)))


@pytest.fixture(scope="module")
def whole_tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return _whole(tmp_path_factory.mktemp("whole"), tiny_model, all_prompts(tiny_model), 64)


@pytest.fixture(scope="module")
def whole_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Half of the prompts, without the longest, and shorter answers: each variant still takes a quarter of a minute."""
    return _whole(tmp_path_factory.mktemp("whole"), smollm2, all_prompts(smollm2)[::2], 40)


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster(tmp_path, "") as made:
        yield made


def _others(whole: Whole, count: int) -> list[GenerateRequest]:
    """Unrelated requests that share every step with the ones under test."""
    rng = random.Random(7)
    sampling = SamplingParams(max_tokens=100, temperature=1.0, ignore_eos=True, frequency_penalty=0.5)
    return [
        GenerateRequest(f"other-{i}", tuple(rng.choices(range(3, 500), k=20 + 11 * i)), replace(sampling, seed=i))
        for i in range(count)
    ]


async def _run(variant: Variant, node: Node, whole: Whole, plan: tuple[PrefillCandidate, ...]) -> list[list[Answer]]:
    requests = [replace(r, prefill=plan, n=variant.n) for r in whole.requests]
    async with DecodeClient(node) as client:
        for other in _others(whole, variant.num_others):
            await client.submit(replace(other, prefill=plan))
        rounds = []
        for number in range(variant.rounds):
            named = [replace(r, request_id=f"{r.request_id}/{number}") for r in requests]
            if variant.alone:
                rounds.append([await client.generate(r) for r in named])
            else:
                rounds.append(await client.generate_all(named))
        return rounds


def check(nodes: Cluster, variant: Variant, whole: Whole) -> None:
    if variant.transport == "ucx" and not HAS_UCX:
        pytest.skip("ucxx is not installed: pip install 'kvferry[ucx]'")
    nodes.model = str(whole.model)
    if variant.preempted:
        longest = max(len(r.prompt_token_ids) for r in whole.requests)
        few = 8 + (longest + 64) // 16  # hold the longest by itself, and not all at once
        variant = replace(variant, decode=(*variant.decode, "--num-blocks-override", str(few)))
    if variant.split:
        prefill = nodes.start_node("prefill", *variant.common, wait=False)
        decode = nodes.start_node("decode", *variant.common, *variant.decode, wait=False)
        nodes.wait_node(prefill)
        nodes.wait_node(decode)
        plan: tuple[PrefillCandidate, ...] = (prefill.candidate(),)
    else:
        decode, plan = nodes.start_node("both", *variant.common), ()

    rounds = asyncio.run(_run(variant, decode, whole, plan))

    for answers in rounds:
        for request, want, got in zip(whole.requests, whole.answers, answers, strict=True):
            assert got.finish_reason == "length", f"{request.request_id}: {got.finish_reason} {got.error}"
            assert got.token_ids == want.token_ids, f"{request.request_id}: other tokens"
            assert got.logprobs == want.logprobs, f"{request.request_id}: same tokens, other logprobs"
    if variant.rounds > 1:
        cached = [answer.first.cached_tokens for answer in rounds[-1] if answer.first]
        expected = [(len(r.prompt_token_ids) - 1) // 16 * 16 for r in whole.requests]
        assert cached == expected, "the second round was not served from the cache"
    if variant.preempted:
        assert decode.metric("kvferry:num_preemptions_total") > 0, "nothing was preempted: this variant tests nothing"
    if variant.n > 1:
        assert decode.metric("kvferry:kv_blocks_copied_total") > 0, "nothing was copied: this variant tests nothing"
    if variant.split and "100000" not in variant.decode:
        moved = decode.metric("kvferry:transfer_blocks_total", transport=variant.transport)
        assert moved > 0, f"no block came over {variant.transport}: this variant tests nothing"
        assert decode.metric("kvferry:prefill_fallback_total") == 0
    for node in [p for p in nodes.processes if isinstance(p, Node)]:
        assert node.metric("kvferry:engine_info", batch_invariant="true") == 1
        accounts = node.record().load.accounts
        assert variant.num_others or accounts.available == accounts.total, f"{node.name} still owns blocks: {accounts}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_tiny_model(nodes: Cluster, variant: Variant, whole_tiny: Whole) -> None:
    check(nodes, variant, whole_tiny)


@pytest.mark.e2e
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.alone], ids=lambda v: v.name)
def test_smollm2(nodes: Cluster, variant: Variant, whole_smollm2: Whole) -> None:
    check(nodes, variant, whole_smollm2)
