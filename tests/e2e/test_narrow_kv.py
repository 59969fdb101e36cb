"""A split over KV blocks of 16 bits returns, bit for bit, what one sequence alone computes over such blocks."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import torch

from kvferry.common.requests import GenerateRequest, SamplingParams
from tests.e2e.alone import Alone
from tests.e2e.cluster import Answer, DecodeClient, Node, cluster

LENGTHS = (200, 180, 33, 16)
PARAMS = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, logprobs=0, ignore_eos=True)


def test_split_over_16_bit_kv_equals_one_sequence_alone(tiny_model: Path, tmp_path: Path) -> None:
    flags = "--kv-cache-dtype", "bfloat16", "--num-blocks-override", "28"
    prompts = [tuple(random.Random(length).choices(range(3, 500), k=length)) for length in LENGTHS]
    requests = [GenerateRequest(f"{i}", prompt, replace(PARAMS, seed=i)) for i, prompt in enumerate(prompts)]
    with cluster(tmp_path, str(tiny_model)) as nodes:
        prefill = nodes.start_node("prefill", *flags, wait=False)
        decode = nodes.start_node("decode", *flags, "--local-prefill-max-tokens", "0", wait=False)
        alone = Alone.load(tiny_model, torch.bfloat16)
        expected = [alone.generate(r.prompt_token_ids, r.sampling) for r in requests]
        nodes.wait_node(prefill)
        nodes.wait_node(decode)
        answers = asyncio.run(_ask(decode, [replace(r, prefill=(prefill.candidate(),)) for r in requests]))
        assert decode.metric("kvferry:transfer_blocks_total", transport="shm") > 0
        assert decode.metric("kvferry:cache_config_info", cache_dtype="bfloat16") == 1
    for answer, tokens in zip(answers, expected, strict=True):
        assert answer.token_ids == [token.token_id for token in tokens]
        assert answer.logprobs == [token.logprob for token in tokens]
    wide = Alone(alone.model).generate(prompts[0], requests[0].sampling)
    assert [t.logprob for t in wide] != [t.logprob for t in expected[0]], "nothing was rounded"


async def _ask(decode: Node, requests: list[GenerateRequest]) -> list[Answer]:
    async with DecodeClient(decode) as client:
        return await client.generate_all(requests)
