"""Elementwise and dense ops: right, and invariant at odd sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvferry.kernels import ops
from tests.kernels.rows import ODD_WIDTHS, ROW_COUNTS, assert_rows_invariant, randn, threads


@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_rms_norm_is_right_and_invariant(width: int) -> None:
    x, weight = randn(560, width), randn(width, seed=1)
    got = assert_rows_invariant(lambda rows: ops.rms_norm(rows, weight, 1e-5), x)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_add_rms_norm_is_an_add_and_a_norm(width: int) -> None:
    x, other, weight = randn(560, width), randn(560, width, seed=1), randn(width, seed=2)
    total = x + other
    got = assert_rows_invariant(lambda rows: ops.add_rms_norm(rows, other[: len(rows)] * 0, weight, 1e-5), total)
    assert torch.equal(ops.add_rms_norm(x, other, weight, 1e-5), got)
    assert torch.equal(x, total)


@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_silu_and_mul_is_right_and_invariant(width: int) -> None:
    x = randn(560, 2 * width) * 4
    got = assert_rows_invariant(ops.silu_and_mul, x)
    torch.testing.assert_close(got, F.silu(x[:, :width]) * x[:, width:])


def test_silu_is_accurate_over_the_whole_range() -> None:
    gate = torch.linspace(-90, 90, 40001).view(1, -1)
    got = ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    exact = (gate.double() / (1 + torch.exp(-gate.double()))).float()
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-36)


def test_silu_of_extreme_gates_is_finite() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30]])
    got = ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(got, F.silu(gate))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a weight"):
        ops.rms_norm(randn(3, 8), randn(7), 1e-5)
    with pytest.raises(ValueError, match="do not fit"):
        ops.add_rms_norm(randn(3, 8), randn(2, 8), randn(8), 1e-5)
    with pytest.raises(ValueError, match="must be contiguous"):
        ops.add_rms_norm(randn(8, 3).T, randn(3, 8), randn(8), 1e-5)


@pytest.mark.parametrize(("width", "out"), [(576, 960), (1536, 576), (576, 3072), (63, 100), (7, 3), (2500, 65)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_right_and_invariant(width: int, out: int, has_bias: bool) -> None:
    weight, bias = randn(out, width), randn(out, seed=1) if has_bias else None
    x = randn(600, width, seed=2)  # more rows than one piece
    got = assert_rows_invariant(ops.pack_linear(weight, bias), x)
    torch.testing.assert_close(got, F.linear(x, weight, bias), atol=1e-3, rtol=1e-4)


def test_linear_of_no_rows_is_empty() -> None:
    assert ops.pack_linear(randn(5, 7))(torch.empty(0, 7)).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_of_half_precision_is_right_and_invariant(dtype: torch.dtype) -> None:
    weight, x = randn(100, 576).to(dtype), randn(40, 576, seed=1).to(dtype)
    got = assert_rows_invariant(ops.pack_linear(weight), x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, F.linear(x.double(), weight.double()).to(dtype))


@pytest.mark.parametrize(("width", "out"), [(63, 7), (1024, 64), (1025, 65), (2500, 3)])
def test_linear_sums_in_the_order_that_it_states_whatever_the_processor(width: int, out: int) -> None:
    """Chains of 1,024 fused multiply-adds, added in order. 64 bits hold a product and what a sum of it rounds to."""
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("numpy's longdouble is no longer than a double here: fused multiply-adds cannot be checked")
    weight, x = randn(out, width), randn(3, width, seed=1)
    a, b = x.numpy().astype(np.longdouble), weight.numpy().astype(np.longdouble)
    total = np.zeros((3, out), dtype=np.float32)
    for start in range(0, width, 1024):
        chain = np.zeros((3, out), dtype=np.float32)
        for i in range(start, min(start + 1024, width)):
            chain = (a[:, i, None] * b[:, i] + chain).astype(np.float32)
        total = chain if start == 0 else total + chain
    assert torch.equal(ops.pack_linear(weight)(x), torch.from_numpy(total))


def test_numerics_id_does_not_depend_on_threads() -> None:
    ids = set()
    for count in (1, 2):
        with threads(count):
            ops.cpu_numerics.numerics_id.cache_clear()
            ids.add(ops.numerics_id(torch.device("cpu"), torch.float32))
    assert len(ids) == 1
    assert "float32" in ids.pop()


def test_each_kv_dtype_has_a_numerics_id_of_its_own() -> None:
    cpu, dtypes = torch.device("cpu"), (torch.float32, torch.bfloat16, torch.float16)
    plain, *narrow = (ops.numerics_id(cpu, torch.float32, kv_dtype=dtype) for dtype in dtypes)
    assert plain == ops.numerics_id(cpu, torch.float32)
    digests = {found.rpartition("-")[2] for found in (plain, *narrow)}
    assert len(digests) == 3
    assert ["-kvbfloat16-" in narrow[0], "-kvfloat16-" in narrow[1], "-kv" in plain] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_are_copied_one_after_the_other_whatever_is_in_them(dtype: torch.dtype) -> None:
    pool = randn(5, 2, 2, 1, 3, 7).to(dtype)
    pool[1, 0, 0, 0, 1] = torch.nan
    expected = pool.clone()
    expected[4], expected[0] = pool[1], pool[1]
    ops.copy_blocks(pool, [1, 4], [4, 0])
    torch.testing.assert_close(pool, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("width", [63, 512, 49152])
def test_log_softmax_and_softmax_are_invariant(width: int) -> None:
    """torch's own ops that the sampler relies on."""
    x = randn(max(ROW_COUNTS) + 6, width) * 5
    assert_rows_invariant(lambda rows: torch.log_softmax(rows, dim=-1), x)
    assert_rows_invariant(lambda rows: torch.softmax(rows, dim=-1), x)
    assert_rows_invariant(lambda rows: rows.argmax(-1), x.round())
