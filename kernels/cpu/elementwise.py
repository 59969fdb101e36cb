"""What a layer does on a CPU between its matrix products and attention, in float32 and in one pass each."""

from __future__ import annotations

import torch

from kvferry.kernels.cpu.jit.constants import BFLOAT16, FLOAT16, FLOAT32
from kvferry.kernels.cpu.native import float_bits, kernels

KV_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""What the pool's numbers may be. They are rounded to the nearest when written, of two to the even one."""

_ONE_THREAD = 2**14
"""Elements that one thread handles sooner than a team would start."""


def _num_threads(num_elements: int) -> int:
    return 1 if num_elements <= _ONE_THREAD else torch.get_num_threads()


def add_rms_norm(x: torch.Tensor, other: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty_like(x)
    kernels().run(
        "add_rms_norm",
        _num_threads(x.numel()),
        x.data_ptr(),
        0 if other is None else other.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        rows,
        width,
        float_bits(eps),
    )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    num_threads = _num_threads(out.numel() * 4)
    kernels().run("silu_and_mul", num_threads, gate_up.data_ptr(), out.data_ptr(), rows, width)
    return out


def rotary_and_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    block_bytes, layer_bytes = (stride * kv_cache.element_size() for stride in kv_cache.stride()[:2])
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    kernels().run(
        "rotary_and_write_kv",
        _num_threads(qkv.numel()),
        qkv.data_ptr(),
        cos_sin.data_ptr(),
        slot_mapping.data_ptr(),
        kv_cache.data_ptr() + layer * layer_bytes,
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        block_bytes,
        qkv.shape[0],
        float_bits(eps),
        KV_KINDS[kv_cache.dtype],
    )
    return qkv[:, : num_heads * head_dim].view(-1, num_heads, head_dim)
