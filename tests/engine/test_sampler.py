"""The sampler: each parameter does what vLLM's does, and a row's token depends on that row alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.sample_rows import SampleRow
from kvferry.services.engine.sampler import SampledToken, philox4x32, uniforms
from tests.engine.sampling import sample
from tests.kernels.rows import randn, threads

VOCAB = 1000


def row(position: int = 10, index: int = 0, output: tuple[int, ...] = (), **params: Any) -> SampleRow:
    params = {"temperature": 1.0, "seed": 7} | params
    return SampleRow(SamplingParams(**params), position, index, (1, 2, 3), output, (0,))


def tokens(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return [token.token_id for token in sample(logits, rows)]


def drawn(logits: torch.Tensor, count: int, **params: Any) -> set[int]:
    """The tokens that `count` draws from one row of logits give."""
    rows = [row(position, **params) for position in range(count)]
    return set(tokens(logits.expand(count, -1), rows))


# Random numbers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: list[int], key: int, expected: list[int]) -> None:
    got = philox4x32(np.array([counter], np.uint64), np.array([key], np.uint64))
    assert got[0].tolist() == expected


def test_uniforms_depend_on_seed_index_and_position_and_look_uniform() -> None:
    seeds = np.array([0, 1, 2**64 - 1, 2**63], np.uint64).repeat(4)
    indices, positions = np.array([0, 0, 1, 1] * 4), np.array([0, 1] * 8)
    assert len(set(uniforms(seeds, indices, positions).tolist())) == 16
    many = uniforms(np.full(20000, 3, np.uint64), np.zeros(20000, np.int64), np.arange(20000))
    assert (many >= 0).all()
    assert (many < 1).all()
    counts, _ = np.histogram(many, bins=20, range=(0, 1))
    assert abs(counts - 1000).max() < 150
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.03


# Draws


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125])
    got = tokens(probs.log().expand(8000, -1), [row(position) for position in range(8000)])
    shares = torch.bincount(torch.tensor(got), minlength=4) / 8000
    torch.testing.assert_close(shares, probs, atol=0.02, rtol=0)


def test_temperature_sharpens_and_flattens() -> None:
    logits = torch.tensor([2.0, 0.0]).expand(4000, -1)
    for temperature in (0.5, 1.0, 4.0):
        got = tokens(logits, [row(position, temperature=temperature) for position in range(4000)])
        assert abs(got.count(0) / 4000 - 1 / (1 + np.exp(-2 / temperature))) < 0.03


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-40])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = randn(5, VOCAB) * 1e4
    got = sample(logits, [row(i, temperature=temperature, logprobs=1) for i in range(5)])
    assert [token.token_id for token in got] == logits.argmax(-1).tolist()
    assert all(np.isfinite(token.logprob) for token in got if token.logprob is not None)


def test_a_small_temperature_that_is_drawn_is_finite() -> None:
    logits = randn(5, VOCAB) * 1e4
    assert tokens(logits, [row(i, temperature=2e-5) for i in range(5)]) == logits.argmax(-1).tolist()


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 50), -torch.inf)
    logits[0, 17] = -3.0
    logits[0, 20] = -4.0
    assert drawn(logits, 500) == {17, 20}


def test_top_k_keeps_the_best() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.3, 0.2, 0.4]])
    assert drawn(logits, 300, top_k=2) == {1, 4}
    assert drawn(logits, 300, top_k=100) == {0, 1, 2, 3, 4}
    assert drawn(logits, 20, top_k=1) == {1}


def test_top_p_keeps_the_fewest_that_reach_the_mass() -> None:
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    assert drawn(logits, 400, top_p=0.69) == {0, 2}
    assert drawn(logits, 400, top_p=0.71) == {0, 2, 3}
    assert drawn(logits, 20, top_p=1e-9) == {0}
    assert drawn(logits, 400, top_p=1.0) == {0, 1, 2, 3}


def test_min_p_keeps_what_is_likely_enough_beside_the_best() -> None:
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()
    assert drawn(logits, 400, min_p=0.45) == {0, 2, 3}
    assert drawn(logits, 20, min_p=1.0) == {0}


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = torch.tensor([[0.4, 0.1, 0.3, 0.2]]).log()  # top_k=2 leaves 4/7 and 3/7
    assert drawn(logits, 300, top_k=2, top_p=0.55) == {0}
    assert drawn(logits, 300, top_k=2, top_p=0.6) == {0, 2}


# Changes of the logits


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.6, 0.0]])
    greedy = {"temperature": 0.0, "output": (1, 1)}
    assert tokens(logits, [row(**greedy, presence_penalty=0.3)]) == [1]
    assert tokens(logits, [row(**greedy, presence_penalty=0.5)]) == [2]
    assert tokens(logits, [row(**greedy, frequency_penalty=0.25)]) == [2]
    assert tokens(logits, [row(temperature=0.0, presence_penalty=2.0)]) == [1]


def test_repetition_penalty_counts_prompt_and_output_in_both_signs() -> None:
    logits = torch.tensor([[0.0, 4.0, 3.9, 3.8, 3.7]])
    assert tokens(logits, [row(temperature=0.0, repetition_penalty=1.2)]) == [4]  # 1, 2, 3 are in the prompt
    assert tokens(-logits, [row(temperature=0.0, repetition_penalty=2.0, output=(0, 4))]) == [0]
    both = row(temperature=0.0, repetition_penalty=1.2, output=(1, 4))
    assert tokens(logits, [both]) == [1]  # all are punished alike: no token twice


def test_logit_bias_moves_and_bans() -> None:
    logits = torch.tensor([[0.0, 5.0, 4.0]])
    assert tokens(logits, [row(temperature=0.0, logit_bias=((2, 1.5),))]) == [2]
    assert 1 not in drawn(logits, 200, logit_bias=((1, -100.0),))


def test_eos_and_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0]])
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1,)}
    assert tokens(logits, [row(**params, output=(5,))]) == [2]
    assert tokens(logits, [row(**params, output=(5, 5))]) == [0]


def test_tokens_past_the_vocabulary_harm_nothing() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]])
    params = {"min_tokens": 3, "stop_token_ids": (3, -1), "logit_bias": ((99, 5.0),), "frequency_penalty": 1.0}
    assert tokens(logits, [row(temperature=0.0, output=(7,), **params)]) == [1]


def test_logits_are_left_as_they_are() -> None:
    logits = randn(2, VOCAB)
    before = logits.clone()
    sample(logits, [row(temperature=0.0, logit_bias=((1, 5.0),)), row(top_p=0.5, repetition_penalty=2.0)])
    assert torch.equal(logits, before)


# Log-probabilities


def test_logprobs_are_of_the_raw_logits_and_only_for_who_asked() -> None:
    logits = randn(3, VOCAB)
    expected = logits.log_softmax(-1)
    plain, chosen, top = sample(
        logits,
        [row(temperature=0.0), row(logprobs=0, temperature=0.3), row(logprobs=3, logit_bias=((5, 99.0),))],
    )
    assert plain == SampledToken(plain.token_id)
    assert (chosen.logprob, chosen.top) == (expected[1, chosen.token_id].item(), ())
    assert (top.token_id, top.logprob) == (5, expected[2, 5].item())
    values, ids = expected[2].topk(3)
    assert top.top == tuple(zip(ids.tolist(), values.tolist(), strict=True))


def test_equally_likely_top_tokens_are_ordered_by_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 500] = 1.0
    assert [token for token, _ in sample(logits, [row(logprobs=4)])[0].top] == [500, 0, 1, 2]


@pytest.mark.parametrize("step", [0.01, 0.5, 2.0])
def test_top_tokens_are_those_of_sorting_whatever_is_alike(step: float) -> None:
    """From few equally likely tokens to so many that some of a row's best are not looked at first."""
    logits, counts = (randn(33, VOCAB) / step).round() * step, [i % 21 for i in range(33)]
    got = sample(logits, [row(logprobs=count) for count in counts])
    for one, logprobs, count in zip(got, logits.log_softmax(-1).tolist(), counts, strict=True):
        best = sorted(enumerate(logprobs), key=lambda pair: (-pair[1], pair[0]))[:count]
        assert one.top == tuple(best)


def test_a_step_is_read_from_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    for name in ("cpu", "tolist", "item", "nonzero"):
        read = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, _read=read: reads.append(self) or _read(self))
    sample(randn(33, VOCAB), [row(i, logprobs=i % 6, top_p=0.9) for i in range(33)])
    assert len(reads) == 1
    sample(randn(33, VOCAB), [row(i, top_p=0.9) for i in range(33)])
    assert len(reads) == 2


def test_more_logprobs_than_tokens_gives_all() -> None:
    assert len(sample(randn(1, 5), [row(logprobs=20)])[0].top) == 5


# Company


def mixed_rows(count: int) -> list[SampleRow]:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.9, "logprobs": 2},
        {"top_k": 5, "presence_penalty": 0.5, "output": (4, 9, 4)},
        {"min_p": 0.1, "logit_bias": ((3, 1.0),)},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 5},
        {"top_p": 0.999, "top_k": 500, "min_tokens": 5},
    ]
    return [row(position=i, index=i % 3, seed=i // 2, **kinds[i % len(kinds)]) for i in range(count)]


@pytest.mark.parametrize("vocab", [63, VOCAB, 49152])
def test_a_row_is_sampled_alike_alone_and_in_a_batch(vocab: int) -> None:
    logits, rows = randn(33, vocab) * 2, mixed_rows(33)
    together = sample(logits, rows)
    assert len({token.token_id for token in together}) > 10
    for count in (1, 2):
        with threads(count):
            for num_rows in (1, 2, 3, 8):
                for start in (0, 4, 20):
                    part = slice(start, start + num_rows)
                    assert sample(logits[part].clone(), rows[part]) == together[part], f"{num_rows} from {start}"


def test_a_row_of_nan_harms_no_other_row() -> None:
    logits, rows = randn(8, VOCAB), mixed_rows(8)
    expected = sample(logits, rows)
    logits[3] = torch.nan
    got = sample(logits, rows)
    assert got[:3] + got[4:] == expected[:3] + expected[4:]
    assert 0 <= got[3].token_id < VOCAB


def test_only_seed_index_and_position_move_a_draw() -> None:
    logits = randn(1, 49152)
    base = row(seed=1, index=0, position=5)
    first = tokens(logits, [base])
    torch.manual_seed(99)
    assert tokens(logits, [replace(base, prompt_token_ids=(9,), output_token_ids=(8,))]) == first
    others = [row(seed=2, position=5), row(seed=1, index=1, position=5), row(seed=1, position=6)]
    assert all(tokens(logits, [other]) != first for other in others)


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


def test_rows_and_logits_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1"):
        sample(randn(2, VOCAB), [row()])
