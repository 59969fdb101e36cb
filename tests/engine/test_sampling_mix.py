"""A batch of mixed parameters gives each row, bit for bit, what the row alone gives; and what the lists forbid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.sample_rows import SampleRow
from kvferry.services.engine.token_masks import completing
from kvferry.services.engine.top_tokens import token_logprobs
from tests.engine.sampling import sample
from tests.kernels.rows import randn, threads

VOCAB = 97
tokens = st.integers(0, VOCAB - 1)
histories = st.lists(tokens, max_size=12).map(tuple)


def _sometimes(off: Any, on: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.just(off) | on


params = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    min_tokens=_sometimes(0, st.integers(1, 12)),
    temperature=_sometimes(0.0, st.floats(0.05, 3)),
    top_p=_sometimes(1.0, st.floats(0.01, 1)),
    top_k=_sometimes(0, st.integers(1, 200)),
    min_p=_sometimes(0.0, st.floats(0, 1)),
    repetition_penalty=_sometimes(1.0, st.floats(0.5, 2)),
    presence_penalty=_sometimes(0.0, st.floats(-2, 2)),
    frequency_penalty=_sometimes(0.0, st.floats(-2, 2)),
    logit_bias=_sometimes(
        (), st.dictionaries(tokens, st.floats(-100, 100), max_size=5).map(lambda d: tuple(d.items()))
    ),
    stop_token_ids=_sometimes((), st.lists(tokens, max_size=3).map(tuple)),
    seed=st.integers(0, 2**64 - 1),
    logprobs=_sometimes(None, st.integers(0, 20)),
    allowed_token_ids=_sometimes((), st.lists(tokens, min_size=1, max_size=30, unique=True).map(tuple)),
    bad_words=_sometimes((), st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)),
)
rows = st.builds(
    SampleRow,
    params=params,
    position=st.integers(0, 5000),
    index=st.integers(0, 7),
    prompt_token_ids=histories,
    output_token_ids=histories,
    eos_token_ids=st.just((2,)),
)


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(rows, min_size=2, max_size=12), seed=st.integers(0, 2**16), num_threads=st.sampled_from((1, 2)))
def test_each_row_of_a_mixed_batch_is_what_it_is_alone(batch: list[SampleRow], seed: int, num_threads: int) -> None:
    logits = randn(len(batch), VOCAB) * (1 + seed % 5)
    before = logits.clone()
    with threads(num_threads):
        together = sample(logits, batch)
    for i, row in enumerate(batch):
        assert sample(logits[i : i + 1].clone(), [row]) == [together[i]], row
    assert torch.equal(logits, before)


@settings(max_examples=100, deadline=None)
@given(row=rows, seed=st.integers(0, 2**16))
def test_no_token_is_drawn_that_the_lists_forbid(row: SampleRow, seed: int) -> None:
    p = row.params
    banned = set(completing(p.bad_words, row.output_token_ids))
    if len(row.output_token_ids) < p.min_tokens:
        banned |= {2, *p.stop_token_ids}
    allowed = (set(p.allowed_token_ids) or set(range(VOCAB))) - banned
    got = sample(randn(1, VOCAB) + seed % 3, [row])[0].token_id
    assert got in allowed or not allowed


@pytest.mark.parametrize(
    ("words", "output", "banned"),
    [
        ([(5,)], (), [5]),
        ([(1, 2)], (), []),
        ([(1, 2)], (1,), [2]),
        ([(1, 2)], (2, 1), [2]),
        ([(1, 2)], (1, 3), []),
        ([(1, 2, 3)], (2,), []),
        ([(1, 2, 3)], (9, 1, 2), [3]),
        ([(1, 1, 1)], (1,), []),
        ([(1, 1, 1), (4,)], (1, 1), [1, 4]),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_behind_the_others(
    words: list[tuple[int, ...]], output: tuple[int, ...], banned: list[int]
) -> None:
    assert completing(words, output) == banned
    assert completing(words, list(output)) == banned


def test_allowed_tokens_keep_their_logits_whatever_is_past_the_vocabulary() -> None:
    logits = torch.tensor([[9.0, 1.0, 3.0, 8.0]])
    row = SampleRow(SamplingParams(temperature=0.0, allowed_token_ids=(1, 2, 77), logprobs=1), 1)
    (got,) = sample(logits, [row])
    assert got.token_id == 2
    assert got.logprob == logits.log_softmax(-1)[0, 2].item()


def test_logprobs_of_given_tokens_do_not_depend_on_how_many_rows_there_are() -> None:
    logits = randn(70, 1000)
    ids = list(range(0, 700, 10))
    whole = token_logprobs(logits, ids, 3)
    assert [entry.rank for entry in whole] == [int((row >= row[i]).sum()) for row, i in zip(logits, ids, strict=True)]
    for size in (1, 2, 3, 8, 33):
        parts = [token_logprobs(logits[at : at + size], ids[at : at + size], 3) for at in range(0, 70, size)]
        assert [entry for part in parts for entry in part] == whole
