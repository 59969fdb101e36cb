"""Dense layers on a CPU whose rows keep their bits in any company.

oneDNN's private op with prepacked weights is wrapped here and nowhere else. It is trusted only after a self check in
this process; otherwise something slower takes its place. Knows only tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from kvferry.kernels.cpu.invariance import holds_for_rows

MAX_ROWS = 512
"""Rows per call: beyond this the order of sums was never checked."""

_PACK_HINT = 32
"""Rows that oneDNN packs for. With 1 it packs for a matrix-vector kernel whose sums run in another order."""

_GEMM_ROWS = 48


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


class PackedLinear:
    """`x @ weight.T + bias` in float32 arithmetic; the result has the dtype of `x`.

    Weights are kept in float32 whatever their dtype was: a CPU without bfloat16 units multiplies no faster otherwise.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._kernel = dense_kernel()
        self._packed = self._kernel.pack(weight.float())
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        pieces = [self._kernel.multiply(piece, self._packed) for piece in torch.split(x.float().contiguous(), MAX_ROWS)]
        out = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if self._bias is not None:
            out += self._bias
        return out.to(x.dtype)
