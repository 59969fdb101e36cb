"""Norms, activation, rotary with the KV write, moves of blocks: near the reference, same bits, nothing else touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvferry.kernels import reference
from kvferry.kernels.triton import elementwise
from tests.kernels.triton.cases import DTYPES, LAYER, Shape, assert_near, randn

WIDTHS = (7, 63, 100, 576, 2000)
ROW_COUNTS = (1, 2, 3, 8, 33)
SHAPES = [Shape(4, 2, 64, 16), Shape(3, 1, 80, 8), Shape(2, 2, 128, 128), Shape(1, 1, 14, 7)]


def assert_rows_invariant(op: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> None:
    whole = op(rows)
    for num_rows in ROW_COUNTS:
        for start in (0, len(rows) - num_rows):
            part = rows[start : start + num_rows].clone()
            assert torch.equal(op(part), whole[start : start + num_rows]), f"{num_rows} rows from {start}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x, other, weight = (randn(*s, seed=i, dtype=dtype).to(device) for i, s in enumerate([(3, width)] * 2 + [(width,)]))
    assert_near(elementwise.add_rms_norm(x, None, weight, 0.1), reference.rms_norm(x, weight, 0.1))
    added = x + other
    assert_near(elementwise.add_rms_norm(x, other, weight, 0.1), reference.rms_norm(added, weight, 0.1))
    assert_near(x, added)


@pytest.mark.parametrize("width", [63, 576])
def test_rows_of_norms_and_activations_keep_their_bits(width: int, device: torch.device) -> None:
    rows, weight = randn(40, 2 * width).to(device), randn(2 * width, seed=1).to(device)
    assert_rows_invariant(lambda x: elementwise.add_rms_norm(x, None, weight, 1e-5), rows)
    assert_rows_invariant(elementwise.silu_and_mul, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_and_mul(width: int, dtype: torch.dtype, device: torch.device) -> None:
    gate_up = randn(3, 2 * width, dtype=dtype).to(device)
    assert_near(elementwise.silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_silu_of_large_numbers_is_finite(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -89.0, 1e4, 2.0, 3.0, 4.0]], device=device)
    assert_near(elementwise.silu_and_mul(gate_up), torch.tensor([[0.0, 0.0, 4e4]], device=device))


def rotary_arguments(shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """The projection, cosines and sines, a pool of NaN, slots in it."""
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    angle = randn(num_tokens, shape.head_dim // 2, seed=1)
    num_blocks = num_tokens // shape.block_size + 3
    slots = torch.randperm(num_blocks * shape.block_size, generator=torch.Generator().manual_seed(2))[:num_tokens]
    found = randn(num_tokens, width, dtype=dtype), torch.cat((angle.cos(), angle.sin()), 1)
    return [one.to(device) for one in (*found, shape.pool(num_blocks, dtype), slots)]


@pytest.mark.parametrize("has_norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.float32) for shape in SHAPES] + [(SHAPES[1], dtype) for dtype in DTYPES[1:]],
    ids=str,
)
def test_rotary_and_write_kv(shape: Shape, dtype: torch.dtype, has_norms: bool, device: torch.device) -> None:
    qkv, cos_sin, pool, slots = rotary_arguments(shape, 5, dtype, device)
    norms = [randn(shape.head_dim, seed=i, dtype=dtype).to(device) if has_norms else None for i in (3, 4)]
    wanted_pool = pool.clone()
    want = reference.rotary_and_write_kv(qkv.clone(), cos_sin, wanted_pool, LAYER, slots, *norms, 0.1)
    got = elementwise.rotary_and_write_kv(qkv, cos_sin, pool, LAYER, slots, *norms, 0.1)
    assert_near(got, want)
    assert torch.equal(pool.isnan(), wanted_pool.isnan()), "slots written that are not the tokens'"
    assert_near(pool.nan_to_num(7.0), wanted_pool.nan_to_num(7.0))


def test_a_token_is_rotated_and_written_with_the_same_bits_in_any_company(device: torch.device) -> None:
    qkv, cos_sin, pool, slots = rotary_arguments(SHAPES[1], 33, torch.float32, device)
    pools = pool.clone(), pool.clone()
    whole = elementwise.rotary_and_write_kv(qkv.clone(), cos_sin, pools[0], LAYER, slots, None, None, 0.0)
    for start, stop in ((0, 1), (1, 3), (3, 6), (6, 14), (14, 33)):
        part = slice(start, stop)
        got = elementwise.rotary_and_write_kv(
            qkv[part].clone(), cos_sin[part], pools[1], LAYER, slots[part], None, None, 0.0
        )
        assert torch.equal(got, whole[part])
    assert torch.equal(pools[0].nan_to_num(7.0), pools[1].nan_to_num(7.0))


def test_a_token_without_a_slot_is_rotated_and_written_nowhere(device: torch.device) -> None:
    qkv, cos_sin, pool, slots = rotary_arguments(SHAPES[0], 5, torch.float32, device)
    slots[[0, 3]] = -1
    wanted_pool = pool.clone()
    want = reference.rotary_and_write_kv(qkv.clone(), cos_sin, wanted_pool, LAYER, slots, None, None, 0.0)
    got = elementwise.rotary_and_write_kv(qkv, cos_sin, pool, LAYER, slots, None, None, 0.0)
    assert_near(got, want)
    assert torch.equal(pool.isnan(), wanted_pool.isnan())
    assert int(pool.isfinite().sum()) == 3 * 2 * SHAPES[0].num_kv_heads * SHAPES[0].head_dim


def test_a_pool_in_16_bit_takes_float32_keys(device: torch.device) -> None:
    qkv, cos_sin, pool, slots = rotary_arguments(SHAPES[0], 3, torch.float32, device)
    low, wanted = pool.half(), pool.clone()
    reference.rotary_and_write_kv(qkv.clone(), cos_sin, wanted, LAYER, slots, None, None, 0.0)
    elementwise.rotary_and_write_kv(qkv, cos_sin, low, LAYER, slots, None, None, 0.0)
    assert_near(low.nan_to_num(7.0), wanted.half().nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_move_bit_by_bit_and_no_other_is_touched(shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    pool = shape.pool(9, dtype).to(device)
    pool[2:5] = randn(*pool[2:5].shape, dtype=dtype).to(device)
    before = pool.clone()
    here, there = torch.tensor([4, 2], device=device), torch.tensor([0, 7], device=device)
    gathered = elementwise.gather_blocks(pool, here)
    assert torch.equal(gathered, before[here])
    elementwise.scatter_blocks(gathered, pool, there)
    elementwise.copy_blocks(pool, here, torch.tensor([8, 1], device=device))
    want = before.clone()
    want[[0, 7, 8, 1]] = before[[4, 2, 4, 2]]
    assert torch.equal(pool.nan_to_num(7.0), want.nan_to_num(7.0))


def test_slots_past_2_to_the_31_elements_are_found(device: torch.device) -> None:
    """64-bit offsets. On a CPU the pool is an address range: two of its pages are touched."""
    shape, dtype = Shape(1, 1, 16, 16), torch.float32
    block = shape.pool(1, dtype)
    num_blocks = 2**31 // block.numel() + 2
    qkv, cos_sin, _, _ = rotary_arguments(shape, 1, dtype, device)
    pool = torch.empty((num_blocks, *block.shape[1:]), dtype=dtype, device=device)
    pool[-1] = 0
    slot = torch.tensor([num_blocks * 16 - 1], device=device)
    elementwise.rotary_and_write_kv(qkv, cos_sin, pool, LAYER, slot, None, None, 0.0)
    assert torch.equal(pool[-1, LAYER, 1, 0, -1], qkv[0, -16:])
    last = torch.tensor([num_blocks - 1], device=device)
    assert torch.equal(elementwise.gather_blocks(pool, last)[0], pool[-1])
