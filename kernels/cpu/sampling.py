"""The sampler's filters on a CPU: a row's limit is selected, which takes a third of the time of sorting it."""

from __future__ import annotations

import torch

from kvferry.kernels.cpu.jit.constants import BUCKETS
from kvferry.kernels.cpu.native import kernels


def filter_tokens(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`probs` [n, vocab] float32; `top_k` int64, `top_p` float64, `min_p` float32, each [n]. -> a new tensor."""
    probs, top_k, top_p, min_p = probs.contiguous(), top_k.contiguous(), top_p.contiguous(), min_p.contiguous()
    out, (rows, width) = torch.empty_like(probs), probs.shape
    num_threads = min(rows, torch.get_num_threads())
    scratch = torch.empty(num_threads * (BUCKETS + (width + 1) // 2), dtype=torch.float64)
    limits = top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr()
    addresses = probs.data_ptr(), out.data_ptr()
    kernels().run("filter_tokens", num_threads, *addresses, rows, width, *limits, scratch.data_ptr())
    return out
