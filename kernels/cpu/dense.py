"""Dense layers on a CPU whose rows keep their bits in any company.

oneDNN's private op with prepacked weights is wrapped here and nowhere else. It is trusted only after a self check in
this process; otherwise something slower takes its place. A kernel of our own reads the same packed weights and sums in
the same order, faster on AVX2 at every number of rows, most of all at few, where it runs at the speed of memory; it
serves a layer only where its bits were found to be oneDNN's. Knows only tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu.invariance import holds_for_rows
from kvferry.kernels.cpu.jit.constants import COLUMNS, WIDTH_MULTIPLE
from kvferry.kernels.cpu.native import kernels

MAX_ROWS = 512
"""Rows per call: beyond this the order of sums was never checked."""

_PACK_HINT = 32
"""Rows that oneDNN packs for. With 1 it packs for a matrix-vector kernel whose sums run in another order."""

_GEMM_ROWS = 48

_FEW_ROWS = 8
"""Rows that our own kernel takes where wider vectors than AVX2's exist, which oneDNN uses better."""


@dataclass(frozen=True, slots=True)
class DenseKernel:
    """How weights are kept, and how up to `MAX_ROWS` rows are multiplied by them."""

    name: str
    pack: Callable[[torch.Tensor], torch.Tensor]
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _onednn_pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_HINT)
    return packed


def _onednn_multiply(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return out


def _gemm_multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every call to MKL has the same shape, so every row takes the same path."""
    padded = F.pad(x, (0, 0, 0, -len(x) % _GEMM_ROWS))
    return torch.cat([F.linear(piece, weight) for piece in torch.split(padded, _GEMM_ROWS)])[: len(x)]


def _sum_multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The last resort: one row at a time, products summed per output in pieces of fixed width."""
    rows = []
    for row in x:
        pieces = zip(torch.split(row, 1024), torch.split(weight, 1024, dim=1), strict=True)
        rows.append(sum(((w * r).sum(1) for r, w in pieces), start=torch.zeros(len(weight))))
    return torch.stack(rows)


_KERNELS = (
    DenseKernel(f"onednn{_PACK_HINT}", _onednn_pack, _onednn_multiply),
    DenseKernel(f"gemm{_GEMM_ROWS}", torch.Tensor.contiguous, _gemm_multiply),
    DenseKernel("sum", torch.Tensor.contiguous, _sum_multiply),
)


@cache
def dense_kernel() -> DenseKernel:
    """The first kernel that passes the self check here. Does not depend on the current number of threads."""
    for kernel in _KERNELS[:-1]:
        try:
            if all(_is_invariant(kernel, width, out) for width, out in ((576, 192), (2100, 100), (63, 7))):
                return kernel
        except (RuntimeError, AttributeError):  # oneDNN's private op is gone, or not what it was
            continue
    return _KERNELS[-1]


def _is_invariant(kernel: DenseKernel, width: int, out: int) -> bool:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(out, width, generator=generator)
    packed, rows = kernel.pack(weight), torch.randn(MAX_ROWS, width, generator=generator)
    close = torch.allclose(kernel.multiply(rows, packed), F.linear(rows, weight), atol=1e-3)
    return close and holds_for_rows(lambda x: kernel.multiply(x, packed), rows)


@cache
def _is_avx2() -> bool:
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


@dataclass(frozen=True, slots=True)
class OwnKernel:
    """The kernel over weights `[out, width]` that oneDNN has packed and keeps."""

    address: int
    out: int
    width: int

    @classmethod
    def over(cls, packed: torch.Tensor) -> OwnKernel | None:
        """None if the weights are packed in another way, or the products have other bits than oneDNN's."""
        out, width = packed.shape
        block = (width + -width % WIDTH_MULTIPLE) * COLUMNS
        if not packed.is_mkldnn or torch.ops.mkldnn._nbytes(packed) != -(-out // COLUMNS) * block * 4:
            return None
        found = cls(torch.ops.mkldnn.data_ptr(packed), out, width)
        x = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
        return found if torch.equal(found(x), _onednn_multiply(x, packed)) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_threads, rows = torch.get_num_threads(), x.shape[0]
        out = x.new_empty(rows, self.out)
        scratch = x.new_empty(num_threads * rows * 2 * COLUMNS)
        addresses = x.data_ptr(), self.address, out.data_ptr()
        kernels().run("dense", num_threads, *addresses, rows, self.width, self.out, scratch.data_ptr())
        return out


class PackedLinear:
    """`x @ weight.T + bias` in float32 arithmetic; the result has the dtype of `x`.

    Weights are kept in float32 whatever their dtype was: a CPU without bfloat16 units multiplies no faster otherwise.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._kernel = dense_kernel()
        self._packed = self._kernel.pack(weight.float())
        self._own = OwnKernel.over(self._packed)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_float32 = x.dtype == torch.float32  # conversions that change nothing cost as much as a small product
        out = self._multiply((x if is_float32 else x.float()).contiguous())
        if self._bias is not None:
            out += self._bias
        return out if is_float32 else out.to(x.dtype)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if (num_rows := x.shape[0]) > MAX_ROWS:
            return torch.cat([self._multiply(piece) for piece in torch.split(x, MAX_ROWS)])
        if self._own is not None and (num_rows <= _FEW_ROWS or _is_avx2()):
            return self._own(x)
        return self._kernel.multiply(x, self._packed)
