"""Paged attention on a GPU: near the reference, deaf to what no position wrote, the same bits in any company."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.kernels import reference
from kvferry.kernels.triton import attention
from tests.kernels.triton.cases import DTYPES, LAYER, Pool, Prompt, Shape, assert_near

SHAPES = [Shape(4, 2, 64, 16), Shape(3, 1, 80, 8), Shape(2, 2, 128, 128), Shape(5, 1, 64, 24), Shape(2, 1, 14, 64)]
SMALL = Shape(2, 1, 16, 16)

Part = tuple[Prompt, int, int]
"""A prompt and the half-open interval of its positions that are queried."""


def attend(pool: Pool, parts: Sequence[Part]) -> list[torch.Tensor]:
    starts, context_lens, query = arguments(parts)
    shape, tables = pool.shape, pool.tables([prompt for prompt, _, _ in parts])
    plan = attention.plan_attention(pool.kv_cache, tables, starts, context_lens, shape.num_heads)
    out = attention.paged_attention(query, pool.kv_cache, LAYER, plan, shape.head_dim**-0.5)
    return [out[start:stop] for start, stop in pairwise(starts)]


def arguments(parts: Sequence[Part]) -> tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]:
    starts = (0, *accumulate(stop - start for _, start, stop in parts))
    query = torch.cat([prompt.query[start:stop] for prompt, start, stop in parts])
    return starts, tuple(start for _, start, _ in parts), query


def expected(pool: Pool, parts: Sequence[Part]) -> list[torch.Tensor]:
    starts, context_lens, query = arguments(parts)
    tables = pool.tables([prompt for prompt, _, _ in parts])
    scale = pool.shape.head_dim**-0.5
    out = reference.paged_attention(query, pool.kv_cache, LAYER, tables, starts, context_lens, scale)
    return [out[start:stop] for start, stop in pairwise(starts)]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[0], dtype) for dtype in DTYPES[1:]],
    ids=str,
)
def test_decodes_and_chunks_agree_with_the_reference(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    pool = Pool(shape, 400, dtype, device)
    long, short, one = pool.add(263, 10), pool.add(35, 20), pool.add(1, 30)
    parts: list[Part] = [(long, 262, 263), (one, 0, 1), (long, 243, 263), (short, 0, 35), (short, 32, 34)]
    for got, want in zip(attend(pool, parts), expected(pool, parts), strict=True):
        assert_near(got, want)


@pytest.mark.parametrize("num_keys", [1, 31, 32, 33, 255, 256, 257, 513])
def test_tiles_and_splits_end_where_the_keys_do(num_keys: int, device: torch.device) -> None:
    pool = Pool(SMALL, num_keys, torch.float32, device)
    parts: list[Part] = [(pool.add(num_keys, 1), num_keys - 1, num_keys)]
    assert_near(attend(pool, parts)[0], expected(pool, parts)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_seqs", [2, 3, 8, 33])
def test_a_decode_has_the_same_bits_alone_and_in_a_batch(
    num_seqs: int, dtype: torch.dtype, device: torch.device
) -> None:
    lengths = [270 if i == 1 else 1 + 11 * i % 40 for i in range(num_seqs)]
    pool = Pool(SMALL, 60 * num_seqs + 300, dtype, device)
    parts: list[Part] = [(pool.add(n, 5 * i), n - 1, n) for i, n in enumerate(lengths)]
    together = attend(pool, parts)
    for i in {0, 1, num_seqs - 1}:
        assert torch.equal(attend(pool, [parts[i]])[0], together[i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("end", [90, 530])  # within one split, and over three
def test_a_row_has_the_same_bits_as_a_decode_and_in_any_chunk(
    end: int, dtype: torch.dtype, device: torch.device
) -> None:
    pool = Pool(SMALL, 700, dtype, device)
    seq, other = pool.add(end, 10), pool.add(20, 20)
    whole = attend(pool, [(seq, end - 40, end)])[0]
    assert not whole.isnan().any()
    for start, stop in ((end - 1, end), (end - 20, end - 19), (end - 3, end), (end - 24, end - 7)):
        got = attend(pool, [(other, 19, 20), (seq, start, stop), (other, 3, 9)])[1]
        assert torch.equal(got, whole[start - end + 40 : stop - end + 40]), f"positions {start} to {stop}"


def test_both_schedules_give_the_same_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(SMALL, 600, torch.float32, device)
    parts: list[Part] = [(pool.add(530, 1), 526, 530)]
    split = attend(pool, parts)[0]
    monkeypatch.setattr(attention, "MAX_SCRATCH_BYTES", 0)
    assert torch.equal(attend(pool, parts)[0], split)


def test_queries_may_be_a_slice_of_the_fused_projection(device: torch.device) -> None:
    pool = Pool(SMALL, 100, torch.float32, device)
    seq = pool.add(40, 1)
    fused = torch.full((40, 4, 16), torch.nan, device=device)
    fused[:, :2] = seq.query
    sliced = Prompt(fused[:, :2], seq.table)
    plan = attention.plan_attention(pool.kv_cache, pool.tables([seq]), (0, 40), (0,), 2)
    got = attention.paged_attention(sliced.query, pool.kv_cache, LAYER, plan, 0.25)
    assert torch.equal(got, attend(pool, [(seq, 0, 40)])[0])


def test_infinite_garbage_in_other_slots_does_not_leak(device: torch.device) -> None:
    pool = Pool(SMALL, 100, torch.float32, device)
    seq = pool.add(37, 1)
    parts: list[Part] = [(seq, 36, 37), (seq, 20, 37)]
    want = attend(pool, parts)
    pool.kv_cache[pool.kv_cache.isnan()] = torch.inf
    for got, one in zip(attend(pool, parts), want, strict=True):
        assert torch.equal(got, one)


def test_a_pool_in_16_bit_serves_float32_queries(device: torch.device) -> None:
    pool = Pool(SMALL, 100, torch.float32, device)
    parts: list[Part] = [(pool.add(37, 1), 20, 37)]
    pool.kv_cache = pool.kv_cache.half()
    assert_near(attend(pool, parts)[0], expected(pool, parts)[0])


def test_scores_of_any_size_give_finite_weights(device: torch.device) -> None:
    """Differences of thousands: most weights vanish, and the maximum moves from tile to tile."""
    pool = Pool(SMALL, 400, torch.float32, device)
    seq = pool.add(300, 1)
    big = Prompt(seq.query * 1e4, seq.table)
    parts: list[Part] = [(big, 299, 300), (big, 250, 258)]
    for got, want in zip(attend(pool, parts), expected(pool, parts), strict=True):
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)


def test_blocks_past_2_to_the_31_elements_are_found(device: torch.device) -> None:
    shape = Shape(2, 1, 16, 16)
    block = 2 * 2 * 16 * 16
    num_blocks = 2**31 // block + 2
    pool = Pool(shape, 100, torch.float16, device)
    seq = pool.add(16, 1)
    want = attend(pool, [(seq, 8, 16)])[0]
    large = torch.empty((num_blocks, *pool.kv_cache.shape[1:]), dtype=torch.float16, device=device)
    large[-1] = pool.kv_cache[seq.table[0]]
    pool.kv_cache = large
    assert torch.equal(attend(pool, [(Prompt(seq.query, [num_blocks - 1]), 8, 16)])[0], want)


def planned_by_a_loop(starts: Sequence[int], context_lens: Sequence[int], tokens: int) -> tuple[list[list[int]], ...]:
    """Walked items, split items and split rows, of sequences one after the other."""
    walked: list[list[int]] = []
    split: list[list[int]] = []
    split_rows: list[list[int]] = []
    for i, ((start, stop), context) in enumerate(zip(pairwise(starts), context_lens, strict=True)):
        if 0 < stop - start <= tokens and context + stop - start > attention.SPLIT_KEYS:
            split.append([i, start, stop - start, context, len(split_rows)])
            split_rows += [[row, context + row - start + 1] for row in range(start, stop)]
        else:
            firsts = range(start, stop, tokens)
            walked += [[i, first, min(tokens, stop - first), context + first - start, 0] for first in firsts]
    return sorted(walked, key=lambda item: -item[3] - item[2]), split, split_rows


some_seqs = st.lists(
    st.tuples(st.one_of(st.integers(0, 1), st.integers(0, 70)), st.sampled_from((0, 3, 254, 255, 256, 257, 700, 4000))),
    max_size=12,
)


@given(seqs=some_seqs, group=st.sampled_from((1, 3, 4)), dtype=st.sampled_from(DTYPES))
def test_a_plan_is_what_a_loop_over_sequences_makes(
    seqs: list[tuple[int, int]], group: int, dtype: torch.dtype
) -> None:
    starts, context_lens = (0, *accumulate(count for count, _ in seqs)), [context for _, context in seqs]
    pool, tables = torch.empty(1, 1, 2, 2, 16, 16, dtype=dtype), torch.zeros(len(seqs), 300, dtype=torch.int64)
    plan = attention.plan_attention(pool, tables, starts, context_lens, 2 * group)
    walked, split, split_rows = planned_by_a_loop(starts, context_lens, plan.tile.rows // group)
    parts = plan.walked.items, plan.split.items, plan.split_rows
    assert [part.tolist() for part in parts] == [walked, split, split_rows]
    assert all(part.dtype == torch.int32 and part.is_contiguous() and part.data_ptr() % 16 == 0 for part in parts)
    assert plan.split.num_splits == max((-(-keys // attention.SPLIT_KEYS) for _, keys in split_rows), default=1)
