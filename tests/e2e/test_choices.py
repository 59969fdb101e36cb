"""Several samples and beams of one prompt, through the split cluster, equal those of one `both` node, bit for bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.common.requests import BeamParams, GenerateRequest, PrefillCandidate, SamplingParams
from tests.e2e.cluster import Answer, DecodeClient, Node, cluster
from tests.e2e.prompts import all_prompts

SAMPLED = SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=3, logprobs=1, ignore_eos=True)
BEAMS = SamplingParams(max_tokens=24, temperature=0.0, beam=BeamParams(), logprobs=1)


async def _ask(node: Node, requests: list[GenerateRequest]) -> list[list[Answer]]:
    async with DecodeClient(node) as client:
        return list(await asyncio.gather(*map(client.generate_choices, requests)))


def _facts(answers: list[list[Answer]]) -> list[list[tuple[list[int], list[float], str | None]]]:
    return [[(one.token_ids, one.logprobs, one.finish_reason) for one in choices] for choices in answers]


@pytest.mark.parametrize(("sampling", "n"), [(SAMPLED, 4), (BEAMS, 3)], ids=["samples", "beams"])
def test_choices_of_the_split_equal_those_of_the_whole(
    tiny_model: Path, tmp_path: Path, sampling: SamplingParams, n: int
) -> None:
    requests = [GenerateRequest(p.name, p.token_ids, sampling, n=n) for p in all_prompts(tiny_model)[2:14]]
    with cluster(tmp_path, str(tiny_model)) as nodes:
        both = nodes.start_node("both", wait=False)
        prefill = nodes.start_node("prefill", wait=False)
        tight = ("--local-prefill-max-tokens", "0", "--num-blocks-override", "60")
        decode = nodes.start_node("decode", *tight, wait=False)
        for node in (both, prefill, decode):
            nodes.wait_node(node)
        plan: tuple[PrefillCandidate, ...] = (prefill.candidate(),)
        whole = asyncio.run(_ask(both, requests))
        split = asyncio.run(_ask(decode, [replace(r, prefill=plan) for r in requests]))
        assert _facts(split) == _facts(whole)
        assert all(one.finish_reason for choices in whole for one in choices)
        assert len({tuple(one.token_ids) for one in whole[0]}) > 1, "all choices are the same: nothing was sampled"
        assert decode.metric("kvferry:transfer_blocks_total") > 0
        assert decode.metric("kvferry:kv_blocks_copied_total") > 0
        for node in (both, prefill, decode):
            accounts = node.record().load.accounts
            assert accounts.available == accounts.total, f"{node.name}: {accounts}"
