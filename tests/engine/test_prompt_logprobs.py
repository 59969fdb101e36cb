"""Log-probabilities of a prompt through the real engine: the same bits in any chunks, beside hits, and preempted."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvferry.common.hashing import root_name
from kvferry.common.requests import SamplingParams
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.runner import TorchRunner
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence
from kvferry.services.engine.top_tokens import token_logprobs
from tests.engine.paging import PagedModel

BLOCK = 16
PARAMS = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, prompt_logprobs=2)
PROMPT = random.Random(4).choices(range(3, 500), k=150)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LlamaModel:
    return load_model(tiny_model, torch.float32)


def make_engine(
    model: LlamaModel, num_blocks: int, budget: int, kv_dtype: torch.dtype = torch.float32
) -> tuple[Engine, list[StepReport]]:
    config, reports = model.config, list[StepReport]()
    dims = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
    runner = TorchRunner(model, torch.full(dims, torch.nan, dtype=kv_dtype), (2,))
    scheduler = Scheduler(BlockPool(num_blocks), SchedulerLimits(8, budget, 10))
    return Engine(runner, scheduler, (2,), 2048, reports.append), reports


def submit(engine: Engine, key: str, prompt: list[int], params: SamplingParams, n: int = 1) -> Sequence:
    seq = Sequence(key, list(prompt), len(prompt), root_name("m", "n"), BLOCK, params)
    for index in range(1, n):
        seq.add_branch(f"{key}{index}", index)
    engine.submit(seq)
    return seq


def run(engine: Engine) -> None:
    while engine.step():
        pass
    engine.check()


@pytest.mark.parametrize("budget", [1, 7, 64, 100, 2048])
@pytest.mark.parametrize("n", [1, 3])
def test_they_do_not_depend_on_chunks_and_come_once(model: LlamaModel, budget: int, n: int) -> None:
    _, logits = PagedModel(model).prefill(PROMPT, chunk=33)
    want = tuple(token_logprobs(logits[:-1], PROMPT[1:], 2))
    engine, reports = make_engine(model, 60, budget)
    submit(engine, "before", PROMPT, replace(PARAMS, prompt_logprobs=None))
    run(engine)  # the prompt is cached now
    submit(engine, "other", PROMPT[:90], replace(PARAMS, prompt_logprobs=None, temperature=1.0))
    submit(engine, "a", PROMPT, PARAMS, n)
    run(engine)
    firsts = [t.first for report in reports for t in report.tokens if t.key.startswith("a") and t.first is not None]
    assert [first.prompt_logprobs for first in firsts] == [want]
    assert firsts[0].cached_tokens == 0
    assert all(t.first is None or not t.first.prompt_logprobs for r in reports for t in r.tokens if t.key == "other")


def test_a_prompt_of_one_token_has_none(model: LlamaModel) -> None:
    engine, reports = make_engine(model, 10, 64)
    submit(engine, "a", [5], PARAMS)
    run(engine)
    assert [t.first.prompt_logprobs for r in reports for t in r.tokens if t.first is not None] == [()]


def test_a_preempted_prompt_begins_again(model: LlamaModel) -> None:
    """Both fit until the first has produced some tokens; the second is then in the middle of its prompt."""
    engine, reports = make_engine(model, 12, 16)
    submit(engine, "first", PROMPT[:30][::-1], replace(PARAMS, max_tokens=60, prompt_logprobs=None))
    engine.step()
    engine.step()
    seq = submit(engine, "second", PROMPT, PARAMS)
    run(engine)
    assert seq.num_preemptions > 0
    _, logits = PagedModel(model).prefill(PROMPT, chunk=33)
    (first,) = [t.first for report in reports for t in report.tokens if t.key == "second" and t.first is not None]
    assert first.prompt_logprobs == tuple(token_logprobs(logits[:-1], PROMPT[1:], 2))
