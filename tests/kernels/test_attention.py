"""Paged attention: right, near the reference, bit-identical to itself in any company, and deaf to the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from kvferry.kernels import ops, reference
from tests.kernels.rows import randn, threads


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    num_layers: int = 3


SHAPES = [
    Shape(9, 3, 64),
    Shape(6, 2, 16, 8),
    Shape(4, 4, 10, 1),
    Shape(4, 2, 80, 24),
    Shape(5, 1, 63, 48),
    Shape(8, 1, 128, 128),
    Shape(8, 2, 64, 32),
    Shape(2, 2, 24),
]
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYER = 1


class Pool:
    """A pool of NaN whose blocks are handed out in random order, and plain copies of what was written."""

    def __init__(self, shape: Shape, num_slots: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        num_blocks = -(-num_slots // shape.block_size)
        dims = (num_blocks, shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.shape, self.kv_cache = shape, torch.full(dims, torch.nan, dtype=dtype)
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()

    def add(self, num_tokens: int, seed: int) -> Sequence_:
        """A sequence with random keys and values of `num_tokens` positions, written to the pool."""
        shape = self.shape
        table = [self._free.pop() for _ in range(-(-num_tokens // shape.block_size))]
        key, value = (randn(num_tokens, shape.num_kv_heads, shape.head_dim, seed=seed + i) for i in (1, 2))
        query = randn(num_tokens, shape.num_heads, shape.head_dim, seed=seed + 3)
        position = torch.arange(num_tokens)
        slots = torch.tensor(table)[position // shape.block_size] * shape.block_size + position % shape.block_size
        reference.write_kv(self.kv_cache, LAYER, key, value, slots)
        return Sequence_(query, key, value, table)


@dataclass(frozen=True)
class Sequence_:  # noqa: N801 - not collections.abc.Sequence
    query: torch.Tensor  # [num_tokens, num_heads, head_dim] of every position
    key: torch.Tensor
    value: torch.Tensor
    table: list[int]


Part = tuple[Sequence_, int, int]
"""A sequence and the half-open interval of its positions that are queried."""


def arguments(parts: Sequence[Part]) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Query, block tables, starts, context lengths. Padded columns name block 0, as the engine's do."""
    width = max(len(seq.table) for seq, _, _ in parts)
    tables = torch.tensor([seq.table + [0] * (width - len(seq.table)) for seq, _, _ in parts])
    query = torch.cat([seq.query[start:stop] for seq, start, stop in parts])
    starts = [0]
    for _, start, stop in parts:
        starts.append(starts[-1] + stop - start)
    return query, tables, tuple(starts), tuple(start for _, start, _ in parts)


def attend(pool: Pool, parts: Sequence[Part]) -> list[torch.Tensor]:
    query, tables, starts, context_lens = arguments(parts)
    plan = ops.plan_attention(pool.kv_cache, tables, starts, context_lens)
    out = ops.paged_attention(query, pool.kv_cache, LAYER, plan, pool.shape.head_dim**-0.5)
    return [out[start:stop] for start, stop in pairwise(starts)]


def dense_attention(seq: Sequence_) -> torch.Tensor:
    """Every position's result by torch's own attention, in float64."""
    query, key, value = (x.double().transpose(0, 1) for x in (seq.query, seq.key, seq.value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_scattered_blocks_equals_dense_attention(shape: Shape) -> None:
    pool = Pool(shape, 1600)
    long, short, one = pool.add(333, 10), pool.add(70, 20), pool.add(1, 30)
    parts: list[Part] = [(long, 130, 333), (short, 69, 70), (one, 0, 1), (short, 0, 33), (long, 64, 65)]
    for (seq, start, stop), got in zip(parts, attend(pool, parts), strict=True):
        torch.testing.assert_close(got, dense_attention(seq)[start:stop].float(), atol=2e-5, rtol=1e-4)


def around_every_tile_edge(pool: Pool) -> list[Part]:
    seqs = [pool.add(n, 10 * i) for i, n in enumerate((1, 2, 63, 64, 65, 130, 333))]
    parts: list[Part] = [(seq, len(seq.key) - 1, len(seq.key)) for seq in seqs]
    return [*parts, (seqs[-1], 20, 333), (seqs[3], 0, 64), (seqs[4], 62, 65)]


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_agrees_with_the_reference_around_every_tile_edge(shape: Shape, dtype: torch.dtype) -> None:
    pool = Pool(shape, 1600, dtype=dtype)
    parts = around_every_tile_edge(pool)
    query, tables, starts, context_lens = arguments(parts)
    expected = reference.paged_attention(query, pool.kv_cache, LAYER, tables, starts, context_lens, 0.3)
    plan = ops.plan_attention(pool.kv_cache, tables, starts, context_lens)
    got = ops.paged_attention(query, pool.kv_cache, LAYER, plan, 0.3)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    with threads(2):
        assert torch.equal(ops.paged_attention(query, pool.kv_cache, LAYER, plan, 0.3), got)


def test_queries_may_be_a_slice_of_the_fused_projection() -> None:
    pool = Pool(SHAPES[0], 400)
    seq = pool.add(50, 1)
    fused = randn(50, 15, 64, seed=9)
    fused[:, :9] = seq.query
    plan = ops.plan_attention(pool.kv_cache, torch.tensor([seq.table]), (0, 50), (0,))
    sliced = ops.paged_attention(fused[:, :9], pool.kv_cache, LAYER, plan, 0.125)
    assert torch.equal(sliced, ops.paged_attention(seq.query, pool.kv_cache, LAYER, plan, 0.125))


def test_scores_of_any_size_give_finite_weights() -> None:
    """Differences of thousands: most weights vanish, and the maximum moves from tile to tile."""
    pool = Pool(SHAPES[0], 400)
    seq = pool.add(300, 1)
    query, tables, starts, context_lens = arguments([(seq, 0, 300)])
    plan = ops.plan_attention(pool.kv_cache, tables, starts, context_lens)
    got = ops.paged_attention(query, pool.kv_cache, LAYER, plan, 500.0)
    expected = reference.paged_attention(query, pool.kv_cache, LAYER, tables, starts, context_lens, 500.0)
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", KV_DTYPES[1:])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_16_bits_has_the_bits_of_float32_over_the_same_numbers(shape: Shape, dtype: torch.dtype) -> None:
    pool = Pool(shape, 1600, dtype=dtype)
    parts = around_every_tile_edge(pool)
    narrow, pool.kv_cache = attend(pool, parts), pool.kv_cache.float()
    for part, got, expected in zip(parts, narrow, attend(pool, parts), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected), f"positions {part[1]} to {part[2]} of {len(part[0].key)}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 8, 33])
def test_a_decode_has_the_same_bits_alone_and_in_a_batch(shape: Shape, num_seqs: int) -> None:
    lengths = [1 + 37 * i % 150 for i in range(num_seqs)]
    pool = Pool(shape, 200 * num_seqs)
    parts: list[Part] = [(pool.add(n, 5 * i), n - 1, n) for i, n in enumerate(lengths)]
    together = attend(pool, parts)
    for count in (1, 2):
        with threads(count):
            for part, got in list(zip(parts, together, strict=True))[:5]:
                assert torch.equal(attend(pool, [part])[0], got), f"{count} threads"


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("chunk", [1, 2, 3, 16, 65, 100])
def test_a_prompt_has_the_same_bits_in_any_chunks(shape: Shape, chunk: int, dtype: torch.dtype) -> None:
    pool = Pool(shape, 1000, dtype=dtype)
    seq, other = pool.add(330, 10), pool.add(90, 20)
    whole = attend(pool, [(seq, 0, 330)])[0]
    starts = list(range(0, 330, chunk))
    with threads(2 if chunk % 2 else 1):
        for start in starts[:2] + starts[-2:]:
            stop = min(start + chunk, 330)
            got = attend(pool, [(other, 89, 90), (seq, start, stop), (other, 3, 40)])[1]
            assert torch.equal(got, whole[start:stop]), f"positions {start} to {stop}"


def test_infinite_garbage_in_other_slots_does_not_leak() -> None:
    pool = Pool(SHAPES[0], 400)
    seq = pool.add(100, 1)
    parts: list[Part] = [(seq, 99, 100), (seq, 50, 100)]
    expected = attend(pool, parts)
    pool.kv_cache[pool.kv_cache.isnan()] = torch.inf
    for got, want in zip(attend(pool, parts), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", KV_DTYPES[1:])
def test_a_half_precision_pool_is_attended_in_float32(dtype: torch.dtype) -> None:
    pool = Pool(SHAPES[0], 400)
    seq = pool.add(150, 1)
    low = Sequence_(*(x.to(dtype) for x in (seq.query, seq.key, seq.value)), seq.table)
    pool.kv_cache = pool.kv_cache.to(dtype)
    decode, chunk = attend(pool, [(low, 149, 150), (low, 100, 150)])
    torch.testing.assert_close(chunk, dense_attention(low)[100:].to(dtype), atol=1e-2, rtol=1e-2)
    assert torch.equal(decode[0], chunk[-1])


def test_shapes_that_do_not_fit_are_refused() -> None:
    pool = Pool(SHAPES[1], 100)
    with pytest.raises(ValueError, match="ends past the 8 positions"):
        ops.plan_attention(pool.kv_cache, torch.zeros(1, 1, dtype=torch.int64), (0, 4), (5,))
    plan = ops.plan_attention(pool.kv_cache, torch.zeros(1, 1, dtype=torch.int64), (0, 1), (5,))
    with pytest.raises(ValueError, match="does not fit a pool"):
        ops.paged_attention(torch.zeros(1, 5, 16), pool.kv_cache, 0, plan, 1.0)
