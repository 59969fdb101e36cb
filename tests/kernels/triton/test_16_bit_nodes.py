"""Nodes that compute in 16 bits and keep KV blocks in the same: from the file to sampled tokens, across a hand-over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.common.requests import SamplingParams, TokenLogprobs
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.runner import TorchRunner
from tests.engine.test_host_mirror import BLOCK, Node, make_node, sequence
from tests.engine.test_model import prompt
from tests.kernels.triton.test_decode_graphs import SHAPE, run_again
from tests.tiny_model import write_tiny_model

PROMPT = prompt(2 * BLOCK + 5)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")  # see test_decode_graphs
DRAWN = SamplingParams(max_tokens=3, temperature=0.9, top_p=0.9, seed=3, logprobs=2, ignore_eos=True)


@pytest.fixture(params=[torch.bfloat16, torch.float16], ids=str)
def model(request: pytest.FixtureRequest, on_gpu: torch.device, tmp_path: Path) -> LlamaModel:
    folder = write_tiny_model(tmp_path, shape=SHAPE, tied=False, dtype=request.param)
    return load_model(folder, request.param, on_gpu, batch_invariant=True)


def drawn(node: Node) -> list[tuple[int, TokenLogprobs | None]]:
    return [(token.token_id, token.logprobs) for report in node.reports for token in report.tokens]


def test_a_prompt_computed_elsewhere_gives_the_tokens_of_one_node(model: LlamaModel) -> None:
    whole = make_node(model, mirrored=False)
    whole.engine.submit(sequence("a", PROMPT, DRAWN))
    whole.run()

    prefill, decode = make_node(model, mirrored=True), make_node(model, mirrored=True)
    assert prefill.host.dtype == model.dtype
    prefill.engine.submit(sequence("a", PROMPT[: 2 * BLOCK], None))
    prefill.run()
    (offered,) = (blocks for report in prefill.reports for blocks in report.blocks if blocks.complete)
    runner = decode.engine.runner
    assert isinstance(runner, TorchRunner)
    model.capture_decodes(runner.kv_cache, 2, 64, None if model.device.type == "cuda" else run_again)
    decode.engine.submit(sequence("a", PROMPT, DRAWN, receive=True))
    (admitted,) = (one for report in decode.reports for one in report.admitted)
    for source, target in zip(offered.block_ids, admitted.block_ids, strict=True):
        decode.host[target] = prefill.host[source]
    decode.engine.receive_ended("a", len(offered.block_ids))
    decode.run()
    assert drawn(decode) == drawn(whole)
    assert len(drawn(decode)) == 3
