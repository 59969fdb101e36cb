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
    got = assert_rows_invariant(narrow.NarrowLinear(narrow.narrowed(weight, "int8", group)), x)
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


def on_a_grid(out: int, width: int, num_levels: int, with_offsets: bool) -> torch.Tensor:
    """Weights as dequantised: in each group of 32 whole steps of a float16, from an offset on or around 0."""
    generator = torch.Generator().manual_seed(3)
    num_groups = -(-width // 32)
    levels = torch.randint(0, num_levels + 1, (out, num_groups, 32), generator=generator)
    levels[..., 0], levels[..., 1] = 0, num_levels
    steps = (torch.rand(out, num_groups, 1, generator=generator) / 100 + 1e-4).half().float()
    offsets = torch.randn(out, num_groups, 1, generator=generator).half().float() if with_offsets else 0.0
    whole = levels.float() - (0 if with_offsets else num_levels // 2)
    return (whole * steps + offsets).view(out, -1)[:, :width].contiguous()


EXACT = {
    "int8": on_a_grid(900, 608, 254, with_offsets=False),
    "int8 with offsets": on_a_grid(900, 608, narrow.LEVELS, with_offsets=True),
    "bfloat16": randn(900, 608).bfloat16().float(),
    "float16": randn(900, 608).half().float(),
}


@pytest.mark.parametrize("kept_as", EXACT)
def test_float32_weights_that_are_narrow_are_kept_so_and_have_the_same_bits(kept_as: str) -> None:
    weight, bias, x = EXACT[kept_as], randn(900, seed=1), randn(70, 608, seed=2)
    layer = ops.pack_linear(weight, bias)
    assert isinstance(layer, narrow.NarrowLinear)
    assert layer.kept_as == kept_as
    assert_same_as_float32(assert_rows_invariant(layer, x), x, weight, bias)


@pytest.mark.parametrize("width", [1, 31, 33, 1100])
def test_groups_with_offsets_have_any_width(width: int) -> None:
    weight, x = on_a_grid(65, max(width, 34), narrow.LEVELS, with_offsets=True)[:, :width].contiguous(), randn(9, width)
    kept = narrow.narrowed(weight, "int8 with offsets")
    got = assert_rows_invariant(narrow.NarrowLinear(kept), x)
    assert_same_as_float32(got, x, kept.widened(), None)
    if width > 33:  # else a group may lack its least or its greatest level
        assert torch.equal(kept.widened()[:, :1088], weight[:, :1088])


@pytest.mark.parametrize("kept_as", EXACT)
@pytest.mark.parametrize("row", [0, 899])
def test_a_single_bit_that_would_be_lost_keeps_all_weights_in_float32(kept_as: str, row: int) -> None:
    weight = EXACT[kept_as].clone()
    weight.view(torch.int32)[row, 300] ^= 1
    assert isinstance(ops.pack_linear(weight), dense.PackedLinear)


@pytest.mark.parametrize("odd", [-0.0, torch.inf, torch.nan])
def test_int8_is_no_exact_form_of_what_it_cannot_hold(odd: float) -> None:
    weight = EXACT["int8"].clone()
    weight[5, 7] = odd
    assert isinstance(ops.pack_linear(weight), dense.PackedLinear)


def test_narrow_weights_are_refused_off_the_cpu() -> None:
    with pytest.raises(ValueError, match="weights become int8 on a CPU only, not on meta"):
        ops.pack_linear(torch.empty(4, 4, device="meta"), weight_format="int8")


def test_each_format_has_a_numerics_id_of_its_own() -> None:
    cpu = torch.device("cpu")
    ids = {form: ops.numerics_id(cpu, torch.float32, weight_format=form) for form in get_args(WeightFormat)}
    assert len(set(ids.values())) == 4
    assert f"-wint8g{narrow.GROUP}-" in ids["int8"]
    assert ids["float32"] == ops.numerics_id(cpu, torch.float32)
