"""Dense layers whose weights are kept in one or two bytes and multiplied in float32.

A decode step of few sequences takes as long as its weights take to come from memory; halved or quartered weights halve
or quarter that. The result is, bit for bit, that of a float32 layer over the rounded weights. Knows only tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu.dense import MAX_ROWS, pack_rows
from kvferry.kernels.cpu.jit.constants import BFLOAT16, COLUMNS, FLOAT16, INT8, OFFSET_INT8, WEIGHT_TILE
from kvferry.kernels.cpu.native import kernels

WeightFormat = Literal["float32", "bfloat16", "float16", "int8"]

GROUP = 32
"""Neighbouring weights of one output that share a scale. Measured: docs/benchmarks.md."""

LEVELS = 15
"""Steps between the least and the greatest weight of a group with an offset: 4 bits, as GGUF's Q4_1 has them."""

_KINDS = {
    "int8": (INT8, torch.int8),
    "int8 with offsets": (OFFSET_INT8, torch.int8),
    "bfloat16": (BFLOAT16, torch.bfloat16),
    "float16": (FLOAT16, torch.float16),
}

_PIECE = 2**15
"""So many weights are narrowed and compared at once, within the cache."""


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


def quantize_with_offsets(weight: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [out, width] -> int8 [out, width], and float16 [out, 2 * ceil(width / group)]: scale and offset of each.

    A group's least weight is its offset and becomes 0, its greatest becomes `LEVELS`.
    """
    (out, width), fill = weight.shape, -weight.shape[1] % group
    groups = torch.cat((weight, weight[:, -1:].expand(out, fill)), 1) if fill else weight
    groups = groups.float().reshape(out, -1, group)
    offsets = groups.amin(-1)
    scales = ((groups.amax(-1) - offsets) / LEVELS).half().float()
    steps = torch.where(scales > 0, scales, 1.0)[..., None]
    values = (groups - offsets[..., None]).div_(steps).round_().to(torch.int8)
    return values.view(out, -1)[:, :width], torch.stack((scales, offsets), -1).half().view(out, -1)


def dequantize_with_offsets(values: torch.Tensor, scales: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """The float32 weights that a layer over `quantize_with_offsets`' result multiplies by.

    The product is exact, a float16 times 4 bits, so that two roundings are one, as in the kernel.
    """
    scale, offset = (scales[:, i::2].float().repeat_interleave(group, 1)[:, : values.shape[1]] for i in (0, 1))
    return values.float() * scale + offset


@dataclass(frozen=True, slots=True)
class NarrowWeights:
    """What is kept of `weight` [out, width]."""

    kept_as: str
    values: torch.Tensor  # [out, width]
    scales: torch.Tensor | None  # of each group, and offsets
    group: int

    def widened(self) -> torch.Tensor:
        """The float32 weights that a layer multiplies by."""
        if self.scales is None:
            return self.values.float()
        return (dequantize if self.kept_as == "int8" else dequantize_with_offsets)(self.values, self.scales, self.group)


def narrowed(weight: torch.Tensor, kept_as: str, group: int = GROUP) -> NarrowWeights:
    if kept_as == "int8":
        return NarrowWeights(kept_as, *quantize(weight, group), group)
    if kept_as == "int8 with offsets":
        return NarrowWeights(kept_as, *quantize_with_offsets(weight, group), group)
    return NarrowWeights(kept_as, weight.to(_KINDS[kept_as][1]), None, WEIGHT_TILE)


def narrowed_exactly(weight: torch.Tensor) -> NarrowWeights | None:
    """The narrowest that gives back every bit of `weight`, or None.

    Most checkpoints were trained in 16 bits or have been quantised, whatever they are stored as. One thread does it:
    where others use the cores, a team for each small operation takes ten times as long.
    """
    with _one_thread():
        return _narrowed_exactly(weight)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _narrowed_exactly(weight: torch.Tensor) -> NarrowWeights | None:
    width = weight.shape[1]
    pieces = weight.split(max(1, _PIECE // max(1, width)))
    for kept_as in _KINDS if width >= GROUP else ("bfloat16", "float16"):  # scales of short groups save nothing
        parts: list[NarrowWeights] = []
        for piece in pieces:
            part = narrowed(piece, kept_as)
            if not torch.equal(_bits(part.widened()), _bits(piece)):
                break
            parts.append(part)
        if len(parts) == len(pieces):
            return _joined(parts)
    return None


def _bits(weight: torch.Tensor) -> torch.Tensor:
    """Zeros of both signs differ in it."""
    return weight.float().contiguous().view(torch.int32)


def _joined(parts: list[NarrowWeights]) -> NarrowWeights:
    scales = [part.scales for part in parts if part.scales is not None]
    values = torch.cat([part.values for part in parts])
    return NarrowWeights(parts[0].kept_as, values, torch.cat(scales) if scales else None, parts[0].group)


class NarrowLinear:
    """`x @ weight.T + bias` in float32 arithmetic over weights that are kept narrow."""

    def __init__(self, weights: NarrowWeights, bias: torch.Tensor | None = None) -> None:
        self.out, self.width = weights.values.shape
        self.kept_as, self._group = weights.kept_as, weights.group
        self._kind, _ = _KINDS[weights.kept_as]
        self._scales = None if weights.scales is None else pack_rows(weights.scales)
        self._packed = pack_rows(weights.values)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_float32 = x.dtype == torch.float32
        out = self._multiply((x if is_float32 else x.float()).contiguous())
        if self._bias is not None:
            out += self._bias
        return out if is_float32 else out.to(x.dtype)

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
