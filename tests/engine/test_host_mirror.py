"""A pool in device memory and its copy in the host's, which peers read and write. Here both lie in the host's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.host_mirror import HostMirror
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.runner import TorchRunner
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence

BLOCK = 16
NUM_BLOCKS = 24


@dataclass
class Node:
    """An engine whose runner's pool is poisoned, and what it reported."""

    engine: Engine
    host: torch.Tensor
    reports: list[StepReport]

    def run(self) -> None:
        while self.engine.step():
            pass

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for report in self.reports for token in report.tokens]


def make_node(model: LlamaModel, mirrored: bool) -> Node:
    c = model.config
    dims = (NUM_BLOCKS, c.num_layers, 2, c.num_kv_heads, BLOCK, c.head_dim)
    pool = torch.full(dims, torch.nan, dtype=model.dtype, device=model.device)
    host = torch.full_like(pool, torch.nan, device="cpu") if mirrored else pool
    runner = TorchRunner(model, pool, (), HostMirror(pool, host) if mirrored else None)
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=40, max_num_waiting=8)
    reports: list[StepReport] = []
    return Node(Engine(runner, Scheduler(BlockPool(NUM_BLOCKS, True), limits), (), 512, reports.append), host, reports)


def sequence(key: str, tokens: list[int], sampling: SamplingParams | None, receive: bool = False) -> Sequence:
    return Sequence(key, list(tokens), len(tokens), b"root", BLOCK, sampling, receive=receive)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LlamaModel:
    return load_model(tiny_model, torch.float32, torch.device("cpu"))


GREEDY = SamplingParams(max_tokens=20, temperature=0.0)
PROMPT = random.Random(3).choices(range(3, 200), k=101)


def test_blocks_cross_by_way_of_the_mirrors_and_give_the_same_tokens(model: LlamaModel) -> None:
    whole = make_node(model, mirrored=False)
    whole.engine.submit(sequence("a", PROMPT, GREEDY))
    whole.run()

    prefill, decode = make_node(model, mirrored=True), make_node(model, mirrored=True)
    prefill.engine.submit(sequence("a", PROMPT[:96], None))
    prefill.run()
    (offered,) = (blocks for report in prefill.reports for blocks in report.blocks if blocks.complete)
    decode.engine.submit(sequence("a", PROMPT, GREEDY, receive=True))
    (admitted,) = (one for report in decode.reports for one in report.admitted)
    for source, target in zip(offered.block_ids, admitted.block_ids, strict=True):
        decode.host[target] = prefill.host[source]
    decode.engine.receive_ended("a", len(offered.block_ids))
    decode.run()

    assert decode.token_ids == whole.token_ids
    assert len(decode.token_ids) == 20
    # The answer's full blocks are in the decode node's mirror: the next turn may be pulled from there.
    assert int(decode.host.isfinite().flatten(1).all(1).sum()) == (len(PROMPT) + 19) // BLOCK


def test_a_mirror_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(4, 2\).*no mirror in \(4, 3\)"):
        HostMirror(torch.zeros(4, 2), torch.zeros(4, 3))
