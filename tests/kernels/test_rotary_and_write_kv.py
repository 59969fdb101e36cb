"""Rotary, q/k norms and the KV write in one pass: the bits of the plain ops, and nobody else's slots touched."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from kvferry.kernels import ops, reference
from tests.kernels.rows import ROW_COUNTS, randn, threads
from tests.kernels.test_attention import KV_DTYPES

LAYER = 1


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


SHAPES = [Shape(9, 3, 64, 16), Shape(3, 1, 14, 1), Shape(4, 4, 2, 7), Shape(5, 1, 126, 48), Shape(8, 2, 128, 128)]


@dataclass(frozen=True)
class Case:
    qkv: torch.Tensor
    cos_sin: torch.Tensor
    slots: torch.Tensor
    kv_cache: torch.Tensor  # all NaN


def case(shape: Shape, num_tokens: int, dtype: torch.dtype = torch.float32) -> Case:
    angle = randn(num_tokens, shape.head_dim // 2, seed=1).double()
    num_blocks = -(-num_tokens // shape.block_size) + 2
    slots = torch.randperm(num_blocks * shape.block_size, generator=torch.Generator().manual_seed(2))[:num_tokens]
    dims = num_blocks, 3, 2, shape.num_kv_heads, shape.block_size, shape.head_dim
    kv_cache = torch.full(dims, torch.nan, dtype=dtype)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    return Case(randn(num_tokens, width), torch.cat((angle.cos(), angle.sin()), 1).float(), slots, kv_cache)


def written(kv_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 2, num_kv_heads, head_dim]: what the pool holds in those slots."""
    block_size = kv_cache.shape[4]
    return kv_cache[slots // block_size, LAYER, :, :, slots % block_size]


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("count", [1, 2])
def test_it_has_the_bits_of_the_plain_ops(shape: Shape, count: int, dtype: torch.dtype) -> None:
    given, plain = case(shape, 300, dtype), case(shape, 300, dtype)
    expected = reference.rotary_and_write_kv(
        plain.qkv, plain.cos_sin, plain.kv_cache, LAYER, plain.slots, None, None, 0.0
    )
    with threads(count):
        query = ops.rotary_and_write_kv(given.qkv, given.cos_sin, given.kv_cache, LAYER, given.slots)
    assert torch.equal(query, expected)
    assert torch.equal(given.kv_cache.nan_to_num(7.0), plain.kv_cache.nan_to_num(7.0))  # and nothing else was written
    assert not written(given.kv_cache, given.slots).isnan().any()


def test_rotation_is_that_of_complex_numbers() -> None:
    given = case(SHAPES[0], 40)
    x = given.qkv.view(40, 15, 64)[:, :9].clone()
    query = ops.rotary_and_write_kv(given.qkv, given.cos_sin, given.kv_cache, LAYER, given.slots)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.complex(*given.cos_sin.chunk(2, dim=-1)).unsqueeze(1)
    torch.testing.assert_close(query, torch.cat((pairs.real, pairs.imag), dim=-1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_and_keys_are_normalised_first(shape: Shape) -> None:
    norms = randn(shape.head_dim, seed=3), randn(shape.head_dim, seed=4)
    given, plain = case(shape, 33), case(shape, 33)
    query = ops.rotary_and_write_kv(given.qkv, given.cos_sin, given.kv_cache, LAYER, given.slots, *norms, 1e-5)
    expected = reference.rotary_and_write_kv(plain.qkv, plain.cos_sin, plain.kv_cache, LAYER, plain.slots, *norms, 1e-5)
    torch.testing.assert_close(query, expected)
    torch.testing.assert_close(given.kv_cache, plain.kv_cache, equal_nan=True)


@pytest.mark.parametrize("dtype", KV_DTYPES[1:])
def test_every_kind_of_number_is_rounded_to_the_nearest_even(dtype: torch.dtype) -> None:
    """Signs, subnormals, infinities, NaN, ties to either side and what lies beside them, by values, which stay."""
    low = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = torch.arange(-(2**15), 2**15)[:, None] * 2**16 + low
    numbers = bits.to(torch.int32).view(-1).view(torch.float32).view(-1, 128)
    given = case(Shape(1, 1, 128, 16), len(numbers), dtype)
    given.qkv[:, 256:] = numbers
    ops.rotary_and_write_kv(given.qkv, given.cos_sin, given.kv_cache, LAYER, given.slots)
    got, expected = written(given.kv_cache, given.slots)[:, 1, 0], numbers.to(dtype)
    assert torch.equal(got.isnan(), numbers.isnan())
    kept = ~got.isnan()
    assert torch.equal(got.view(torch.int16)[kept], expected.view(torch.int16)[kept])


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(shape: Shape, dtype: torch.dtype) -> None:
    norms = randn(shape.head_dim, seed=3), randn(shape.head_dim, seed=4)
    whole = case(shape, 40, dtype)
    query = ops.rotary_and_write_kv(whole.qkv, whole.cos_sin, whole.kv_cache, LAYER, whole.slots, *norms, 1e-5)
    for count in (1, 2):
        for rows in ROW_COUNTS:
            for start in (0, 5):
                part, span = case(shape, 40, dtype), slice(start, start + rows)
                with threads(count):
                    got = ops.rotary_and_write_kv(
                        part.qkv[span], part.cos_sin[span], part.kv_cache, LAYER, part.slots[span], *norms, 1e-5
                    )
                assert torch.equal(got, query[span])
                assert torch.equal(written(part.kv_cache, part.slots[span]), written(whole.kv_cache, whole.slots[span]))


def test_shapes_that_do_not_fit_are_refused() -> None:
    given = case(SHAPES[0], 4)
    with pytest.raises(ValueError, match="does not fit a pool"):
        ops.rotary_and_write_kv(given.qkv[:, :-1], given.cos_sin, given.kv_cache, LAYER, given.slots)
    with pytest.raises(ValueError, match="3 slots"):
        ops.rotary_and_write_kv(given.qkv, given.cos_sin, given.kv_cache, LAYER, given.slots[:3])
    pool = given.kv_cache.bfloat16().transpose(3, 4)[:, :, :, :3]
    with pytest.raises(ValueError, match=r"must be contiguous and of torch\.bfloat16"):
        ops.rotary_and_write_kv(given.qkv, given.cos_sin, pool, LAYER, given.slots)
    with pytest.raises(ValueError, match=r"must be contiguous and of torch\.int64"):
        ops.rotary_and_write_kv(given.qkv, given.cos_sin, given.kv_cache, LAYER, given.slots.int())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_beyond_2_to_the_31_elements_are_written_read_and_copied(dtype: torch.dtype) -> None:
    """The pool is address space, of which four blocks become memory; a small one says what is right."""
    shape = SHAPES[0]
    given = case(shape, 20, dtype)
    far = 2**31 // given.kv_cache[0].numel() + 1
    results = []
    for num_blocks, first in ((far + 4, far), (4, 0)):
        try:
            pool = torch.empty(num_blocks, *given.kv_cache.shape[1:], dtype=dtype)
        except RuntimeError as exc:
            pytest.skip(f"no address space for such a pool: {exc}")
        query = ops.rotary_and_write_kv(
            given.qkv.clone(), given.cos_sin, pool, LAYER, torch.arange(20) + first * shape.block_size
        )
        ops.copy_blocks(pool, [first, first + 1], [first + 2, first + 3])
        for table in ([first, first + 1], [first + 2, first + 3]):
            plan = ops.plan_attention(pool, torch.tensor([table]), (0, 20), (0,))
            results.append(ops.paged_attention(query, pool, LAYER, plan, 0.3))
    assert far * given.kv_cache[0].numel() > 2**31
    assert results[0].isfinite().all()
    for result in results[1:]:
        assert torch.equal(result, results[0])
