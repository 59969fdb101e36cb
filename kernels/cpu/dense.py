"""Dense layers on a CPU whose rows keep their bits in any company. Knows only tensors.

No library promises that: oneDNN and MKL choose a kernel, and with it an order of sums, by the processor and the number
of rows. Ours has one order for all rows, all numbers of threads and all processors.
"""

from __future__ import annotations

import torch

from kvferry.kernels.cpu import huge_pages
from kvferry.kernels.cpu.jit.constants import COLUMNS
from kvferry.kernels.cpu.native import kernels

MAX_ROWS = 512
"""Rows per call: their inputs and sums for one block of weights stay in the second-level cache."""


class PackedLinear:
    """`x @ weight.T + bias` in float32 arithmetic; the result has the dtype of `x`.

    Weights [out, width] are kept in float32 whatever their dtype was: a CPU without bfloat16 units multiplies no faster
    otherwise.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out, self.width = weight.shape
        self._packed = pack_rows(weight.float())
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        is_float32 = x.dtype == torch.float32  # conversions that change nothing cost as much as a small product
        out = self._multiply((x if is_float32 else x.float()).contiguous())
        if self._bias is not None:
            out += self._bias
        return out if is_float32 else out.to(x.dtype)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        if (rows := x.shape[0]) > MAX_ROWS:
            return torch.cat([self._multiply(piece) for piece in torch.split(x, MAX_ROWS)])
        num_threads = torch.get_num_threads()
        out = x.new_empty(rows, self.out)
        scratch = x.new_empty(num_threads * rows * 2 * COLUMNS)
        addresses = x.data_ptr(), self._packed.data_ptr(), out.data_ptr()
        kernels().run("dense", num_threads, *addresses, rows, self.width, self.out, scratch.data_ptr())
        return out


def pack_rows(rows: torch.Tensor) -> torch.Tensor:
    """[out, width] -> [ceil(out / COLUMNS), width, COLUMNS]: what a block of outputs multiplies by lies together."""
    (out, width), full = rows.shape, len(rows) // COLUMNS
    packed = huge_pages.zeros(-(-out // COLUMNS), width, COLUMNS, dtype=rows.dtype)
    packed[:full] = rows[: full * COLUMNS].reshape(full, COLUMNS, width).transpose(1, 2)
    if rest := out % COLUMNS:
        packed[full, :, :rest] = rows[full * COLUMNS :].T
    return packed
