"""Dense layers whose weights are kept in one or two bytes and multiplied in float32.

A decode step of few sequences takes as long as its weights take to come from memory; halved or quartered weights halve
or quarter that. The result is, bit for bit, that of a float32 layer over the rounded weights. Knows only tensors.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu.dense import MAX_ROWS, pack_rows
from kvferry.kernels.cpu.jit.constants import BFLOAT16, COLUMNS, FLOAT16, INT8, WEIGHT_TILE
from kvferry.kernels.cpu.native import kernels

WeightFormat = Literal["float32", "bfloat16", "float16", "int8"]

GROUP = 32
"""Neighbouring weights of one output that share a scale. Measured: docs/benchmarks.md."""

_KINDS = {"int8": (INT8, torch.int8), "bfloat16": (BFLOAT16, torch.bfloat16), "float16": (FLOAT16, torch.float16)}


def quantize(weight: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [out, width] -> int8 [out, width] and float32 scales [out, ceil(width / group)], symmetric.

    A group's largest magnitude becomes 127; a weight is its int8 times its group's scale, rounded to float32.
    """
    out, width = weight.shape
    groups = F.pad(weight.float(), (0, -width % group)).view(out, -1, group)
    scales = groups.abs().amax(-1) / 127
    steps = torch.where(scales > 0, scales, 1.0)[..., None]
    return (groups / steps).round_().to(torch.int8).view(out, -1)[:, :width], scales


def dequantize(values: torch.Tensor, scales: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """The float32 weights that a layer over `quantize`'s result multiplies by."""
    return values.float() * scales.repeat_interleave(group, 1)[:, : values.shape[1]]


class NarrowLinear:
    """`x @ weight.T + bias` in float32 arithmetic over weights kept as `weight_format`."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, weight_format: WeightFormat, group: int = GROUP
    ) -> None:
        self.out, self.width = weight.shape
        self._kind, dtype = _KINDS[weight_format]
        self._group = group if weight_format == "int8" else WEIGHT_TILE
        self._scales = None
        if weight_format == "int8":
            weight, scales = quantize(weight, group)
            self._scales = pack_rows(scales)
        self._packed = pack_rows(weight.to(dtype))
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._multiply(x.float().contiguous())
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        num_threads, rows = torch.get_num_threads(), x.shape[0]
        if rows > MAX_ROWS:
            return torch.cat([self._multiply(piece) for piece in torch.split(x, MAX_ROWS)])
        out = x.new_empty(rows, self.out)
        scratch = x.new_empty(num_threads * (rows * 2 + WEIGHT_TILE) * COLUMNS)
        scales = 0 if self._scales is None else self._scales.data_ptr()
        sizes = rows, self.width, self.out, scratch.data_ptr(), self._kind, self._group
        kernels().run(
            "narrow_dense", num_threads, x.data_ptr(), self._packed.data_ptr(), scales, out.data_ptr(), *sizes
        )
        return out
