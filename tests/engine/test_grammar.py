"""Outputs that follow a grammar: always valid, the same whatever happens around them, and no concern of others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from kvferry.common.errors import BadRequest, Unavailable
from kvferry.common.hashing import root_name
from kvferry.common.requests import FinishReason, SamplingParams, StructuredOutput
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.grammar import Grammars, Mask, Matcher
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.outputs import StepReport, TokenOutput
from kvferry.services.engine.runner import TorchRunner
from kvferry.services.engine.sample_rows import SampleRow
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence as Seq
from kvferry.services.gateway.structured import StructuredOutputs, compile_structured
from tests.engine.sampling import sample

BLOCK = 4
EOS = 2
ROOT = root_name("model", "numerics")
PROMPT = list(range(40, 53))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def structured(**fields: Any) -> StructuredOutput:
    made = compile_structured(None, StructuredOutputs.model_validate(fields))
    assert made is not None
    return made


def params(grammar: StructuredOutput | None = None, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 150, "temperature": 1.0, "structured": grammar} | fields))


class Rig:
    """The real engine on the tiny model, stepped by hand."""

    def __init__(self, model: LlamaModel, folder: Path, num_blocks: int = 400, **limits: int) -> None:
        config = model.config
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK, config.head_dim)
        self.model = model
        self.runner = TorchRunner(model, torch.zeros(shape), (EOS,))
        defaults = {"max_num_seqs": 40, "max_num_batched_tokens": 256, "max_num_waiting": 50}
        scheduler = Scheduler(BlockPool(num_blocks), SchedulerLimits(**(defaults | limits)))
        self.reports: list[StepReport] = []
        self.engine = Engine(self.runner, scheduler, (EOS,), num_blocks * BLOCK, self.reports.append)
        self.grammars = Grammars(folder, config.vocab_size, (EOS,))
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def sequence(
        self, key: str, sampling: SamplingParams, n: int = 1, prompt: Sequence[int] = PROMPT, done: Sequence[int] = ()
    ) -> Seq:
        seq = Seq(key, [*prompt, *done], len(prompt), ROOT, BLOCK, sampling)
        if sampling.structured is not None:
            seq.matcher = self.grammars.matcher(sampling.structured)
        for index in range(1, n):
            seq.add_branch(f"{key}.{index}", index)
        return seq

    def run(self, *sequences: Seq) -> dict[str, list[TokenOutput]]:
        self.reports.clear()
        for seq in sequences:
            self.engine.submit(seq)
        while self.engine.step():
            pass
        self.engine.check()
        assert self.engine.load().accounts.available == self.engine.pool.num_blocks
        outputs: dict[str, list[TokenOutput]] = {}
        for token in (token for report in self.reports for token in report.tokens):
            outputs.setdefault(token.key, []).append(token)
        return outputs

    def failures(self) -> dict[str, str]:
        return {failed.key: failed.error.message for report in self.reports for failed in report.failed}

    def text(self, outputs: Sequence[TokenOutput]) -> str:
        text: str = self.tokenizer.decode([token.token_id for token in outputs if token.token_id != EOS])
        return text


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LlamaModel:
    return load_model(tiny_model, torch.float32, torch.device("cpu"))


@pytest.fixture
def rig(model: LlamaModel, tiny_model: Path) -> Rig:
    return Rig(model, tiny_model)


def allowed_after(matcher: Matcher, output: Sequence[int]) -> set[int]:
    mask = matcher.mask(output)
    assert mask.error is None
    return set(np.flatnonzero(~mask.forbidden).tolist())


def ids(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token.token_id for token in outputs]


def is_person(text: str) -> bool:
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert len(person["name"]) <= 6
    assert 0 <= person["age"] <= 150
    assert isinstance(person["age"], int)
    return len(person["tags"]) <= 2 and set(person["tags"]) <= {"red", "green"}


CASES = {
    "json": (structured(json=PERSON, disable_any_whitespace=True), is_person),
    "regex": (structured(regex=r"\d{3}-[a-f]{2,5}( é| 東京)?"), re.compile(r"\d{3}-[a-f]{2,5}( é| 東京)?").fullmatch),
    "choice": (
        structured(choice=["yes", "yesterday", 'a "b"', "ж🙂"]),
        ["yes", "yesterday", 'a "b"', "ж🙂"].__contains__,
    ),
    "gbnf": (structured(grammar='root ::= "<" [a-z]+ ">" | "-"'), re.compile(r"<[a-z]+>|-").fullmatch),
    "lark": (structured(grammar='start: "(" start ")" | "x"\n'), re.compile(r"\(*x\)*").fullmatch),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_match_at_any_temperature_with_any_seed(rig: Rig, name: str) -> None:
    grammar, matches = CASES[name]
    sampled = [params(grammar, seed=seed) for seed in range(20)]
    cut = [params(grammar, seed=seed, temperature=1.7, top_k=5, top_p=0.8, min_p=0.01) for seed in range(5)]
    odd = [params(grammar, seed=seed, repetition_penalty=1.3, frequency_penalty=0.5) for seed in range(5)]
    many = [params(grammar, temperature=0.0), *sampled, *cut, *odd]
    outputs = rig.run(*(rig.sequence(f"s{i}", one) for i, one in enumerate(many)))
    texts = {key: rig.text(tokens) for key, tokens in outputs.items()}
    reasons = {key: tokens[-1].finish_reason for key, tokens in outputs.items()}
    stopped = [key for key, reason in reasons.items() if reason is FinishReason.STOP]
    assert len(outputs) == len(many)
    assert len(stopped) >= 10, "too few ended by themselves to show anything"
    for key in stopped:
        assert matches(texts[key]), texts[key]


def test_a_complete_output_stops_though_end_of_sequence_is_ignored_or_max_tokens_is_reached(rig: Rig) -> None:
    grammar = structured(choice=["a"])
    (alone,) = rig.run(rig.sequence("s", params(grammar, max_tokens=1, ignore_eos=True, min_tokens=1))).values()
    assert rig.text(alone) == "a"
    assert alone[-1].finish_reason is FinishReason.STOP
    (short,) = rig.run(rig.sequence("s", params(structured(regex="a{50}"), max_tokens=3))).values()
    assert short[-1].finish_reason is FinishReason.LENGTH


def test_end_of_sequence_is_allowed_exactly_when_the_output_matches(rig: Rig) -> None:
    matcher = rig.grammars.matcher(structured(regex="ab*"))
    a, b = (rig.tokenizer.token_to_id(char) for char in "ab")
    for output, allowed in (([], False), ([a], True), ([a, b], True)):
        assert (EOS in allowed_after(matcher, output)) is allowed
    assert not matcher.is_complete([a])


def test_what_a_client_forbids_yields_to_the_grammar(rig: Rig) -> None:
    """min_tokens bans the end, though nothing else is left to say."""
    grammar = structured(regex="[ab]c?")
    outputs = rig.run(rig.sequence("s", params(grammar, min_tokens=20)), rig.sequence("t", params(grammar)))
    for tokens in outputs.values():
        assert re.fullmatch("[ab]c?", rig.text(tokens))
        assert tokens[-1].finish_reason is FinishReason.STOP


def test_preemption_changes_nothing(model: LlamaModel, tiny_model: Path) -> None:
    grammar, _ = CASES["json"]
    roomy, tight = Rig(model, tiny_model), Rig(model, tiny_model, num_blocks=18)
    many = [params(grammar, seed=seed, logprobs=1) for seed in range(6)]
    want = roomy.run(*(roomy.sequence(f"s{i}", one) for i, one in enumerate(many)))
    got = tight.run(*(tight.sequence(f"s{i}", one) for i, one in enumerate(many)))
    assert sum(report.stats.num_preemptions for report in tight.reports) > 0
    for key, tokens in want.items():
        assert ids(got[key]) == ids(tokens)
        assert [t.logprobs for t in got[key]] == [t.logprobs for t in tokens]


def test_each_sample_of_a_prompt_follows_the_grammar_by_itself(rig: Rig) -> None:
    grammar, _ = CASES["json"]
    together = rig.run(rig.sequence("s", params(grammar, seed=3), n=3))
    assert len({rig.text(tokens) for tokens in together.values()}) > 1
    for index, key in enumerate(("s", "s.1", "s.2")):
        lone = rig.sequence("lone", params(grammar, seed=3))
        lone.index = index
        assert ids(rig.run(lone)["lone"]) == ids(together[key])
        assert is_person(rig.text(together[key]))


def test_a_sequence_that_comes_with_output_goes_on_where_it_stood(model: LlamaModel, tiny_model: Path) -> None:
    grammar, _ = CASES["json"]
    one = params(grammar, seed=11)
    first, second = Rig(model, tiny_model), Rig(model, tiny_model)
    whole = ids(first.run(first.sequence("s", one))["s"])
    for cut in (1, 2, len(whole) // 2, len(whole) - 1):
        resumed = second.run(second.sequence("s", one, done=whole[:cut]))
        assert ids(resumed["s"]) == whole[cut:]


def test_neighbours_without_a_grammar_are_unchanged_bit_for_bit(rig: Rig) -> None:
    plain = [
        SamplingParams(max_tokens=40, temperature=temperature, seed=seed, logprobs=3, ignore_eos=True)
        for seed, temperature in enumerate((0.0, 0.8, 1.0, 0.0))
    ]

    def neighbours() -> Iterator[Seq]:
        yield from (rig.sequence(f"p{i}", one, prompt=PROMPT[i:]) for i, one in enumerate(plain))

    alone = rig.run(*neighbours())
    constrained = [rig.sequence(f"c{i}", params(CASES["json"][0], seed=i)) for i in range(4)]
    beside = rig.run(*constrained, *neighbours())
    for key, tokens in alone.items():
        assert [(t.token_id, t.logprobs) for t in beside[key]] == [(t.token_id, t.logprobs) for t in tokens]


def test_a_grammar_that_fails_while_it_runs_ends_its_request_alone(rig: Rig) -> None:
    class Failing(Matcher):
        def __init__(self, inner: Matcher) -> None:
            super().__init__(inner._matcher, "structured_outputs.json")

        def mask(self, output_token_ids: Sequence[int]) -> Mask:
            if len(output_token_ids) < 4:
                return super().mask(output_token_ids)
            return super().mask([*output_token_ids, EOS, EOS])

    grammar, _ = CASES["json"]
    want = rig.run(rig.sequence("other", params(grammar, seed=1)))["other"]
    broken = rig.sequence("broken", params(grammar))
    assert broken.matcher is not None
    broken.matcher = Failing(broken.matcher)
    outputs = rig.run(broken, rig.sequence("other", params(grammar, seed=1)))
    assert ids(outputs["other"]) == ids(want)
    assert list(rig.failures()) == ["broken"]
    assert "structured_outputs.json: the output cannot be held to it" in rig.failures()["broken"]
    assert len(outputs["broken"]) == 4
    assert all(token.finish_reason is None for token in outputs["broken"])


def test_a_matcher_that_is_asked_about_another_output_starts_again(rig: Rig) -> None:
    matcher = rig.grammars.matcher(structured(choice=["ab", "ac"]))
    a, b, c = (rig.tokenizer.token_to_id(char) for char in "abc")
    begin, after = allowed_after(matcher, []), allowed_after(matcher, [a])
    assert after >= {b, c}
    assert matcher.is_complete([a, b])
    assert allowed_after(matcher, [a]) == after
    assert matcher.is_complete([a, c])
    assert matcher.clone().is_complete([a, c])
    assert allowed_after(matcher, []) == begin
    assert matcher.is_complete([a, c])
    assert matcher.mask([b]).error is not None


def test_only_the_row_with_a_mask_is_held_to_it() -> None:
    logits = torch.zeros(2, 70)
    logits[:, 69] = 9.0
    forbidden = np.ones(96, np.bool_)  # rounded up
    forbidden[10] = False
    row = SampleRow(SamplingParams(temperature=0.0), 5, mask=Mask(forbidden))
    plain = replace(row, mask=None)
    assert [token.token_id for token in sample(logits, [row, plain])] == [10, 69]
    assert logits[0, 0] == 0


def test_what_only_a_node_can_see_is_refused_there(rig: Rig, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"structured_outputs\.grammar: .*unknown special token") as caught:
        rig.grammars.matcher(structured(grammar='start: "a" <|nope|>'))
    assert caught.value.param == "structured_outputs.grammar"
    grammar, _ = CASES["choice"]
    with pytest.raises(Unavailable, match=r"tokenizer\.json"):
        Grammars(tmp_path, 512, (EOS,)).matcher(grammar)
    with pytest.raises(Unavailable, match="no end-of-sequence"):
        Grammars(tiny_model, 512, ()).matcher(grammar)
