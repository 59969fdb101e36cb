"""Tokens that another engine has produced: what follows is, bit for bit, what would have followed there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.outputs import TokenOutput
from kvferry.services.engine.sequence import Sequence as Seq
from tests.engine.test_grammar import BLOCK, EOS, PERSON, PROMPT, ROOT, Rig, ids, structured

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 3, "top_p": 0.95, "ignore_eos": True},
    "all penalties": {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "ignore_eos": True,
    },
    "bad words": {"temperature": 0.9, "seed": 1, "bad_words": ((17,), (40, 41)), "top_k": 8, "ignore_eos": True},
    "min_tokens": {"temperature": 1.0, "seed": 2, "min_tokens": 15, "logit_bias": ((EOS, 8.0), (60, 7.0))},
    "stop_token_ids": {"temperature": 1.0, "seed": 4, "stop_token_ids": (60, 61), "logit_bias": ((60, 3.5),)},
    "end of sequence": {"temperature": 1.0, "seed": 8, "logit_bias": ((EOS, 3.5),)},
    "json": {"temperature": 1.0, "seed": 6, "structured": structured(json=PERSON), "max_tokens": 150},
}


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LlamaModel:
    return load_model(tiny_model, torch.float32, torch.device("cpu"))


def make_rig(model: LlamaModel, folder: Path, num_blocks: int = 400, **limits: int) -> Rig:
    rig = Rig(model, folder, num_blocks, **limits)
    rig.runner.kv_cache.fill_(torch.nan)
    return rig


def case(name: str) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 24, "logprobs": 2} | PARAMS[name]))


def resumed(rig: Rig, key: str, params: SamplingParams, had: dict[int, Sequence[int]]) -> Seq:
    """As a decode node makes it of a submission: one choice enters with its tokens, several behind their prompt."""
    first = min(had)
    seq = Seq(key, list(PROMPT), len(PROMPT), ROOT, BLOCK, params, first)
    if params.structured is not None:
        seq.matcher = rig.grammars.matcher(params.structured)
    if len(had) == 1:
        seq.token_ids += had[first]
        return seq
    seq.resumed_token_ids = tuple(had[first])
    for index in sorted(had.keys() - {first}):
        seq.add_branch(f"{key}.{index}", index, tuple(had[index]))
    return seq


def told(outputs: Sequence[TokenOutput]) -> list[tuple[Any, ...]]:
    return [(o.token_id, o.logprobs, o.finish_reason, o.stop_token_id) for o in outputs]


def undisturbed(model: LlamaModel, folder: Path, params: SamplingParams, n: int) -> list[list[TokenOutput]]:
    rig = make_rig(model, folder)
    outputs = rig.run(rig.sequence("a", params, n))
    return [outputs["a" if not i else f"a.{i}"] for i in range(n)]


def neighbours(rig: Rig) -> list[Seq]:
    prompts = [[50 + i] * (9 + 5 * i) for i in range(4)]
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=1, repetition_penalty=1.2, ignore_eos=True)
    return [rig.sequence(f"b{i}", params, prompt=prompt) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", PARAMS)
def test_a_choice_goes_on_as_if_nothing_had_happened(model: LlamaModel, tiny_model: Path, name: str) -> None:
    params = case(name)
    (whole,) = undisturbed(model, tiny_model, params, 1)
    assert len(whole) > 2, "too short to be cut"
    for cut, budget in {(1, 5), (2, 256), (len(whole) // 2, 5), (len(whole) // 2, 256), (len(whole) - 1, 256)}:
        rig = make_rig(model, tiny_model, max_num_batched_tokens=budget)
        outputs = rig.run(*neighbours(rig), resumed(rig, "a", params, {0: ids(whole[:cut])}))
        assert told(outputs["a"]) == told(whole[cut:]), (cut, budget)


@pytest.mark.parametrize("name", PARAMS)
def test_several_choices_go_on_from_their_own_tokens(model: LlamaModel, tiny_model: Path, name: str) -> None:
    """One of them has ended and is not produced again, one has had nothing yet, two are at different places."""
    params = case(name)
    whole = undisturbed(model, tiny_model, params, 4)
    had = {0: ids(whole[0][: len(whole[0]) // 2]), 2: [], 3: ids(whole[3][: len(whole[3]) - 1])}
    for budget in (5, 256):
        rig = make_rig(model, tiny_model, max_num_batched_tokens=budget)
        outputs = rig.run(*neighbours(rig), resumed(rig, "a", params, had))
        got = {index: outputs["a" if not index else f"a.{index}"] for index in had}
        assert {i: told(o) for i, o in got.items()} == {i: told(whole[i][len(had[i]) :]) for i in had}


@pytest.mark.parametrize("name", ["seeded", "json"])
@pytest.mark.parametrize("indexes", [(0,), (2,), (1, 3)])
def test_preemption_and_a_full_pool_change_nothing(
    model: LlamaModel, tiny_model: Path, name: str, indexes: tuple[int, ...]
) -> None:
    params = case(name)
    whole = undisturbed(model, tiny_model, params, 4)
    had = {index: ids(whole[index][: len(whole[index]) // 2]) for index in indexes}
    need = -(-(len(PROMPT) + max(map(len, whole))) // BLOCK)
    rig = make_rig(model, tiny_model, num_blocks=need + 6)
    outputs = rig.run(*neighbours(rig), resumed(rig, "a", params, had))
    assert sum(report.stats.num_preemptions for report in rig.reports) > 0
    for index in indexes:
        assert told(outputs["a" if index == min(indexes) else f"a.{index}"]) == told(whole[index][len(had[index]) :])


def test_a_continuation_finds_the_blocks_that_are_cached(model: LlamaModel, tiny_model: Path) -> None:
    params = case("greedy")
    rig = make_rig(model, tiny_model)
    whole = rig.run(rig.sequence("a", params))["a"]
    outputs = rig.run(resumed(rig, "b", params, {0: ids(whole[:12])}))
    assert told(outputs["b"]) == told(whole[12:])
    (first,) = (token.first for token in outputs["b"] if token.first is not None)
    assert first.cached_tokens == (len(PROMPT) + 11) // BLOCK * BLOCK
    assert first.computed_tokens == 0
    assert outputs["b"][0].first is first


@pytest.mark.parametrize("num_choices", [1, 2, 3])
def test_the_facts_about_a_prompt_come_once(model: LlamaModel, tiny_model: Path, num_choices: int) -> None:
    params = case("greedy")
    (whole,) = undisturbed(model, tiny_model, params, 1)
    rig = make_rig(model, tiny_model)
    outputs = rig.run(resumed(rig, "a", params, {i: ids(whole[: 3 + i]) for i in range(num_choices)}))
    assert sum(token.first is not None for tokens in outputs.values() for token in tokens) == 1


def test_closing_one_of_several_while_their_prompt_is_computed(model: LlamaModel, tiny_model: Path) -> None:
    params = case("seeded")
    whole = undisturbed(model, tiny_model, params, 3)
    had = {i: ids(whole[i][:5]) for i in range(3)}
    for closed in range(3):
        rig = make_rig(model, tiny_model, max_num_batched_tokens=4)
        seq = resumed(rig, "a", params, had)
        rig.engine.submit(seq)
        rig.engine.step()
        rig.engine.close("a" if not closed else f"a.{closed}")
        outputs = rig.run()
        want = {"a" if not i else f"a.{i}": told(whole[i][5:]) for i in range(3) if i != closed}
        assert {key: told(tokens) for key, tokens in outputs.items()} == want
