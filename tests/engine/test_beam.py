"""Beam search equals that of transformers, token for token, on a random tiny model and on the default model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.common.hashing import root_name
from kvferry.common.requests import BeamParams, SamplingParams
from kvferry.services.engine.beam_groups import make_group
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.runner import TorchRunner
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence

NUM_TOKENS = 24
PARAMS = [
    BeamParams(length_penalty=penalty, early_stopping=early)
    for penalty in (1.0, 0.0, 2.0)
    for early in ("false", "true", "never")
]


def make_engine(folder: Path, num_blocks: int) -> tuple[Engine, list[StepReport]]:
    model = load_model(folder, torch.float32, torch.device("cpu"))
    config = model.config
    kv_cache = torch.full((num_blocks, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim), torch.nan)
    reports: list[StepReport] = []
    scheduler = Scheduler(BlockPool(num_blocks), SchedulerLimits(64, 256, 100))
    eos = tuple(config.eos_token_ids)
    return Engine(TorchRunner(model, kv_cache, eos), scheduler, eos, num_blocks * 16, reports.append), reports


def search(
    engine: Engine, reports: list[StepReport], prompts: list[list[int]], width: int, beam: BeamParams
) -> list[list[list[int]]]:
    """The results of all prompts, searched at the same time."""
    reports.clear()
    params = SamplingParams(max_tokens=NUM_TOKENS, beam=beam)
    for number, prompt in enumerate(prompts):
        keys = tuple(f"{number}.{index}" for index in range(width))
        seq = Sequence(keys[0], list(prompt), len(prompt), root_name("m", "n"), 16, params)
        make_group(seq, params, keys, NUM_TOKENS, engine.eos_token_ids)
        engine.submit(seq)
    while engine.step():
        pass
    engine.check()
    assert engine.load().accounts.sequence == 0
    tokens = [token for report in reports for token in report.tokens]
    return [
        [[t.token_id for t in tokens if t.key == f"{number}.{index}"] for index in range(width)]
        for number in range(len(prompts))
    ]


def reference(folder: Path, prompt: list[int], width: int, beam: BeamParams) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    early = {"false": False, "true": True, "never": "never"}[beam.early_stopping]
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            length_penalty=beam.length_penalty,
            early_stopping=early,
        )
    return [row[len(prompt) :].tolist() for row in out]


def same(got: list[int], want: list[int], eos: frozenset[int]) -> bool:
    """transformers pads the shorter ones."""
    return got == want[: len(got)] and (len(got) == len(want) or got[-1] in eos)


@pytest.mark.parametrize("beam", PARAMS, ids=lambda b: f"{b.length_penalty}-{b.early_stopping}")
@pytest.mark.parametrize("width", [2, 4])
def test_equal_to_transformers_on_a_tiny_model(tiny_model: Path, width: int, beam: BeamParams) -> None:
    rng = random.Random(width)
    prompts = [rng.choices(range(3, 500), k=length) for length in (1, 16, 45)]
    engine, reports = make_engine(tiny_model, 100)
    for prompt, got in zip(prompts, search(engine, reports, prompts, width, beam), strict=True):
        want = reference(tiny_model, prompt, width, beam)
        for mine, theirs in zip(got, want, strict=True):
            assert same(mine, theirs, engine.eos_token_ids), f"{len(prompt)} tokens: {mine} != {theirs}"


def test_preempted_searches_find_the_same(tiny_model: Path) -> None:
    prompts = [[5 + number] * 40 for number in range(4)]
    roomy, reports = make_engine(tiny_model, 200)
    want = search(roomy, reports, prompts, 4, BeamParams())
    tight, reports = make_engine(tiny_model, 22)
    assert search(tight, reports, prompts, 4, BeamParams()) == want
    assert sum(report.stats.num_preemptions for report in reports) > 0, "nothing was preempted: this tests nothing"


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_equal_to_transformers_on_smollm2(smollm2: Path) -> None:
    prompts = [[504, 3575, 282, 4649, 314], [28, 216, 34, 28, 216, 35, 28, 216, 36, 28]]
    engine, reports = make_engine(smollm2, 120)
    for prompt, got in zip(prompts, search(engine, reports, prompts, 4, BeamParams()), strict=True):
        for mine, theirs in zip(got, reference(smollm2, prompt, 4, BeamParams()), strict=True):
            assert same(mine, theirs, engine.eos_token_ids), f"{mine} != {theirs}"
