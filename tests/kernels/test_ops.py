"""Elementwise and dense ops: right, and invariant at odd sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kvferry.kernels import ops
from kvferry.kernels.cpu import dense
from tests.kernels.rows import ODD_WIDTHS, ROW_COUNTS, assert_rows_invariant, randn, threads


@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_rms_norm_is_right_and_invariant(width: int) -> None:
    x, weight = randn(560, width), randn(width, seed=1)
    got = assert_rows_invariant(lambda rows: ops.rms_norm(rows, weight, 1e-5), x)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_silu_and_mul_is_right_and_invariant(width: int) -> None:
    x = randn(560, 2 * width) * 4
    got = assert_rows_invariant(ops.silu_and_mul, x)
    torch.testing.assert_close(got, F.silu(x[:, :width]) * x[:, width:])


def test_silu_of_extreme_gates_is_finite() -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30]])
    got = ops.silu_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(got, F.silu(gate))


@pytest.mark.parametrize("head_dim", [2, 14, 64])
def test_rotary_embedding_is_right_and_invariant(head_dim: int) -> None:
    x, angle = randn(560, 3, head_dim), randn(560, head_dim // 2, seed=1)
    packed = torch.cat((x.flatten(1), angle), dim=1)

    def rotate(rows: torch.Tensor) -> torch.Tensor:
        heads, angles = rows[:, : 3 * head_dim].view(-1, 3, head_dim), rows[:, 3 * head_dim :]
        return ops.rotary_embedding(heads, angles.double().cos().float(), angles.double().sin().float())

    got = assert_rows_invariant(rotate, packed)
    pairs = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
    torch.testing.assert_close(got, torch.cat((pairs.real, pairs.imag), dim=-1))


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


def test_linear_is_served_by_onednn_here() -> None:
    """On the machines we measure on. Elsewhere the fallback is slower, not wrong."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("not measured on this kind of CPU")
    assert dense.dense_kernel().name == "onednn32"


@pytest.mark.parametrize("kernel", dense._KERNELS[1:], ids=lambda kernel: kernel.name)
def test_every_dense_fallback_is_right_and_invariant(
    kernel: dense.DenseKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "dense_kernel", lambda: kernel)
    weight, x = randn(65, 1100), randn(49, 1100, seed=1)
    got = assert_rows_invariant(ops.pack_linear(weight), x)
    torch.testing.assert_close(got, F.linear(x, weight), atol=1e-3, rtol=1e-4)


def test_a_dense_kernel_that_is_not_invariant_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def depends_on_row_count(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight) * (1 + 1e-6 * len(x))

    def gone(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("_reorder_linear_weight")

    broken = dense.DenseKernel("broken", torch.Tensor.contiguous, depends_on_row_count)
    absent = dense.DenseKernel("absent", gone, depends_on_row_count)
    monkeypatch.setattr(dense, "_KERNELS", (absent, broken, *dense._KERNELS[1:]))
    dense.dense_kernel.cache_clear()
    try:
        assert dense.dense_kernel() in dense._KERNELS[2:]
    finally:
        dense.dense_kernel.cache_clear()


def test_numerics_id_does_not_depend_on_threads() -> None:
    ids = set()
    for count in (1, 2):
        with threads(count):
            ops.cpu_numerics.numerics_id.cache_clear()
            ids.add(ops.numerics_id(torch.device("cpu"), torch.float32))
    assert len(ids) == 1
    assert "float32" in ids.pop()


@pytest.mark.parametrize("width", [63, 512, 49152])
def test_log_softmax_and_softmax_are_invariant(width: int) -> None:
    """torch's own ops that the sampler relies on."""
    x = randn(max(ROW_COUNTS) + 6, width) * 5
    assert_rows_invariant(lambda rows: torch.log_softmax(rows, dim=-1), x)
    assert_rows_invariant(lambda rows: torch.softmax(rows, dim=-1), x)
    assert_rows_invariant(lambda rows: rows.argmax(-1), x.round())
