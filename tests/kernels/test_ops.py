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


def test_linear_is_served_by_onednn_and_our_kernel_here() -> None:
    """On the machines we measure on. Elsewhere the fallback is slower, not wrong."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("not measured on this kind of CPU")
    assert dense.dense_kernel().name == "onednn32"
    assert dense.PackedLinear(randn(100, 1030))._own is not None


@pytest.mark.parametrize(("width", "out"), [(63, 7), (576, 960), (1024, 64), (1025, 65), (1536, 576), (4100, 128)])
def test_our_dense_kernel_has_the_bits_of_onednn(width: int, out: int) -> None:
    packed = dense._onednn_pack(randn(out, width))
    own = dense.OwnKernel.over(packed)
    assert own is not None
    x = randn(dense.MAX_ROWS, width, seed=1)
    for count in (1, 2):
        with threads(count):
            for rows in (1, 2, 3, 4, 5, 8, 33, dense.MAX_ROWS):
                assert torch.equal(own(x[:rows]), dense._onednn_multiply(x[:rows], packed)), f"{rows} rows"


def test_our_dense_kernel_refuses_what_it_cannot_read(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = randn(100, 70)
    assert dense.OwnKernel.over(weight) is None
    assert dense.OwnKernel.over(dense._onednn_pack(randn(130, 70))) is None  # packed in blocks of another width
    monkeypatch.setattr(dense, "_onednn_multiply", lambda x, packed: F.linear(x, weight) + 1)
    assert dense.OwnKernel.over(dense._onednn_pack(weight)) is None


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
