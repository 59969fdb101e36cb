"""Dense layers over narrow weights: the bits of a float32 layer over the rounded weights, in any company."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from kvferry.kernels import ops
from kvferry.kernels.cpu import dense, narrow
from kvferry.kernels.cpu.narrow import WeightFormat
from tests.kernels.rows import assert_rows_invariant, randn

NARROW: tuple[WeightFormat, ...] = get_args(WeightFormat)[1:]


def rounded(weight: torch.Tensor, weight_format: WeightFormat, group: int = narrow.GROUP) -> torch.Tensor:
    """The float32 weights that a narrow layer stands for."""
    if weight_format == "int8":
        return narrow.dequantize(*narrow.quantize(weight, group), group)
    dtype: torch.dtype = getattr(torch, weight_format)
    return weight.to(dtype).float()


def assert_same_as_float32(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    assert torch.equal(got, dense.PackedLinear(weight, bias)(x))


@pytest.mark.parametrize("weight_format", NARROW)
@pytest.mark.parametrize(("width", "out"), [(576, 960), (1536, 576), (63, 100), (7, 3), (2500, 65)])
def test_a_narrow_layer_has_the_bits_of_float32_over_rounded_weights(
    width: int, out: int, weight_format: WeightFormat
) -> None:
    weight, bias, x = randn(out, width), randn(out, seed=1), randn(261, width, seed=2)
    got = assert_rows_invariant(ops.pack_linear(weight, bias, weight_format=weight_format), x)
    assert_same_as_float32(got, x, rounded(weight, weight_format), bias)


def test_more_rows_than_one_piece_change_nothing() -> None:
    weight, x = randn(65, 100), randn(dense.MAX_ROWS + 9, 100, seed=1)
    got = ops.pack_linear(weight, weight_format="int8")(x)
    assert_same_as_float32(got, x, rounded(weight, "int8"), None)


@pytest.mark.parametrize("group", [64, 128])
def test_groups_of_another_size_than_the_tile_are_scaled_right(group: int) -> None:
    weight, x = randn(65, 1100), randn(9, 1100, seed=1)
    got = assert_rows_invariant(narrow.NarrowLinear(weight, None, "int8", group), x)
    assert_same_as_float32(got, x, rounded(weight, "int8", group), None)


def test_quantised_weights_are_half_a_step_off_at_most() -> None:
    weight = randn(33, 150) * torch.logspace(-3, 3, 33)[:, None]
    weight[3] = 0.0
    values, scales = narrow.quantize(weight, 64)
    assert scales.shape == (33, 3)
    assert values.abs().max() == 127
    assert (values.view(33, 150)[:, 128:].abs().amax(1)[torch.arange(33) != 3] == 127).all()  # the short last group too
    steps = scales.repeat_interleave(64, 1)[:, :150]
    assert ((narrow.dequantize(values, scales, 64) - weight).abs() <= steps * 0.5001).all()
    assert torch.equal(narrow.dequantize(values, scales, 64)[3], weight[3])


def test_bfloat16_weights_of_every_kind_are_widened_exactly() -> None:
    """All 65,536 bit patterns, infinities and subnormals among them, through one row and through the tile."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype, weight_format in ((torch.bfloat16, NARROW[0]), (torch.float16, NARROW[1])):
        weight = patterns.view(dtype).view(-1, 1)
        layer = ops.pack_linear(weight.float(), weight_format=weight_format)
        for rows in (1, 2):
            got = layer(torch.ones(rows, 1))
            torch.testing.assert_close(got, weight.float().T.expand(rows, -1), rtol=0, atol=0, equal_nan=True)


def test_narrow_weights_are_refused_off_the_cpu() -> None:
    with pytest.raises(ValueError, match="weights become int8 on a CPU only, not on meta"):
        ops.pack_linear(torch.empty(4, 4, device="meta"), weight_format="int8")


def test_each_format_has_a_numerics_id_of_its_own() -> None:
    cpu = torch.device("cpu")
    ids = {form: ops.numerics_id(cpu, torch.float32, weight_format=form) for form in get_args(WeightFormat)}
    assert len(set(ids.values())) == 4
    assert f"-wint8g{narrow.GROUP}-" in ids["int8"]
    assert ids["float32"] == ops.numerics_id(cpu, torch.float32)
