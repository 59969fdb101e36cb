"""Paged attention on a CPU, in float32: the step's work as a list, made once and used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvferry.kernels.cpu.elementwise import KV_KINDS
from kvferry.kernels.cpu.jit.constants import KV_TILE
from kvferry.kernels.cpu.native import float_bits, kernels
from kvferry.kernels.spread import spread

QUERY_TILE = 32
"""Tokens of a chunk that are attended together: a tile of keys is prepared once for all of them."""

_SHORT_CHUNK = 64
"""Up to here a chunk's tiles are half as large: three of them, one per head, would leave a second thread idle."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    items: (
        torch.Tensor
    )  # [num_items, 4] int64: first query row, number of tokens, context length, block table's address
    max_tokens: int  # of one item
    block_tables: torch.Tensor  # held, because the items point into it


def plan_attention(
    block_tables: torch.Tensor, query_starts: Sequence[int], context_lens: Sequence[int]
) -> AttentionPlan:
    tables = block_tables.contiguous()
    address, row_bytes = tables.data_ptr(), tables.stride(0) * tables.element_size()
    starts, contexts = np.asarray(query_starts, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    counts = np.diff(starts)
    tiles = np.where(counts > _SHORT_CHUNK, QUERY_TILE, QUERY_TILE // 2)
    owners, nth = spread(-(-counts // tiles))
    offsets = nth * tiles[owners]
    items = np.empty((len(owners), 4), dtype=np.int64)
    items[:, 0] = starts[owners] + offsets
    items[:, 1] = np.minimum(tiles[owners], counts[owners] - offsets)
    items[:, 2] = contexts[owners] + offsets
    items[:, 3] = address + owners * row_bytes
    num_tokens = items[:, 1]
    largest_first = np.argsort(-num_tokens * (items[:, 2] + num_tokens), kind="stable")  # threads end at the same time
    return AttentionPlan(torch.from_numpy(items[largest_first]), int(num_tokens.max(initial=0)), tables)


def paged_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """`query` [num_tokens, num_heads, head_dim] with contiguous heads -> the same shape, contiguous."""
    num_tokens, num_heads, head_dim = query.shape
    _, _, _, num_kv_heads, block_size, _ = kv_cache.shape
    block_bytes, layer_bytes, kv_bytes = (stride * kv_cache.element_size() for stride in kv_cache.stride()[:3])
    out = query.new_empty(num_tokens, num_heads, head_dim)
    num_threads = torch.get_num_threads()
    rows = plan.max_tokens * (num_heads // num_kv_heads)
    scratch_floats = 32 + head_dim * KV_TILE + rows * (2 * head_dim + KV_TILE + 8 + 1)
    scratch_floats += -scratch_floats % 16  # threads write to cache lines of their own
    scratch = query.new_empty(num_threads * scratch_floats)
    kernels().run(
        "paged_attention",
        num_threads,
        query.data_ptr(),
        query.stride(0) * 4,
        float_bits(scale),
        kv_cache.data_ptr() + layer * layer_bytes,
        block_bytes,
        kv_bytes,
        out.data_ptr(),
        num_heads,
        num_kv_heads,
        block_size,
        head_dim,
        plan.items.data_ptr(),
        plan.items.shape[0],
        scratch.data_ptr(),
        scratch_floats * 4,
        KV_KINDS[kv_cache.dtype],
    )
    return out
