"""Norms, activation, rotary embedding with the KV write, and moves of whole blocks on a GPU."""

from __future__ import annotations

import torch

from kvferry.kernels.triton.jit import elementwise as jit
from kvferry.kernels.triton.launch import launch, power_of_two

_COLUMNS = 1024
"""Elements that one program of a plain element-wise kernel takes."""

_NO_FUSION = {"enable_fp_fusion": False}


def add_rms_norm(x: torch.Tensor, other: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `other` to `x` [..., width] in place, if there is one -> the rms_norm of the sum. All contiguous."""
    width = weight.shape[0]
    out = torch.empty_like(x)
    num_rows, columns = x.numel() // width, power_of_two(width)
    options = {"num_warps": min(16, max(1, columns // 512))}
    launch(
        jit.add_rms_norm, (num_rows,), x, other, weight, out, width, eps, width=width, columns=columns, options=options
    )
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [num_tokens, 2 * width] contiguous -> [num_tokens, width]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, width)
    launch(jit.silu_and_mul, (num_rows, -(-width // _COLUMNS)), gate_up, out, width, columns=_COLUMNS)
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
    """As `ops.rotary_and_write_kv`, contiguous; the pool may have another dtype. -> a view of `qkv`."""
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    heads = qkv.view(len(qkv), -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    launch(
        jit.rotary_and_write_kv,
        (len(qkv), heads.shape[1]),
        qkv,
        cos_sin,
        kv_cache,
        slot_mapping,
        q_norm,
        k_norm,
        layer * kv_cache.stride(1),
        kv_cache.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        half=power_of_two(head_dim // 2),
        options={"num_warps": 1},
    )
    return heads[:, :num_heads]


def gather_blocks(kv_cache: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """The blocks `sources` [n] int64 of the pool, one after the other -> [n, ...]."""
    out = kv_cache.new_empty(len(sources), *kv_cache.shape[1:])
    _move(kv_cache, out, sources, None, len(sources))
    return out


def scatter_blocks(blocks: torch.Tensor, kv_cache: torch.Tensor, targets: torch.Tensor) -> None:
    """Puts `blocks` [n, ...] into the pool's blocks `targets` [n] int64, no two of them alike."""
    _move(blocks, kv_cache, None, targets, len(targets))


def copy_blocks(kv_cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies blocks inside the pool, all at once: no block is both source and target, none twice a target."""
    _move(kv_cache, kv_cache, sources, targets, len(targets))


def _move(
    source: torch.Tensor,
    target: torch.Tensor,
    sources: torch.Tensor | None,
    targets: torch.Tensor | None,
    count: int,
) -> None:
    source, target = (x.view(len(x), -1).view(torch.int32) for x in (source, target))
    num_words = source.shape[1]
    grid = (count, -(-num_words // _COLUMNS))
    launch(jit.move_blocks, grid, source, target, sources, targets, num_words, words=_COLUMNS)
