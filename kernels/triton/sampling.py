"""Top-k, top-p and min-p, and the draw, on a GPU."""

from __future__ import annotations

import torch

from kvferry.kernels.triton.jit import sampling as jit
from kvferry.kernels.triton.launch import launch, power_of_two

_MAX_COLUMNS = 2048
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


def filter_tokens(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """As `ops.filter_tokens`; `probs` [n, vocab] float32."""
    probs = probs.contiguous()
    out = torch.empty_like(probs)
    limits = top_k.to(torch.int64), top_p.to(torch.float64), min_p.to(torch.float32)
    num_rows, width = probs.shape
    columns = min(_MAX_COLUMNS, power_of_two(width))
    launch(jit.filter_tokens, (num_rows,), probs, *limits, out, width, columns=columns, options=_OPTIONS)
    return out


def draw_tokens(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """As `ops.draw_tokens`; `probs` [n, vocab] float32, `uniform` [n] float64 -> [n] int64."""
    num_rows, width = probs.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=probs.device)
    columns = min(_MAX_COLUMNS, power_of_two(width))
    launch(jit.draw_tokens, (num_rows,), probs.contiguous(), uniform, out, width, columns=columns, options=_OPTIONS)
    return out
