"""Paged attention on a GPU: a step's tiles of queries as a list, made once, and the launches of each layer.

A row's bits depend on that row alone; `jit/attention.py` says why. So it is free which tiles have their keys split
among programs: those of sequences whose queries fit one tile (decodes, and the tail of a prompt after a prefix hit),
as long as the scratch memory for it stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvferry.kernels.triton.jit import attention as jit
from kvferry.kernels.triton.launch import Option, launch, power_of_two

SPLIT_KEYS = 256
"""Keys of a split, counted from position 0. Part of the numerics: another number gives other bits."""

MAX_SCRATCH_BYTES = 256 * 2**20

GRAPH_PROGRAMS = 1024
"""Programs that share the splits of a captured decode step: a few for each processor of a large GPU."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program's work. Part of the numerics."""

    rows: int  # of queries: tokens times heads that share a kv head
    keys: int
    options: dict[str, Option]


TILES = {
    2: Tile(64, 32, {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False}),
    4: Tile(16, 32, {"num_warps": 4, "num_stages": 1, "maxnreg": 255, "enable_fp_fusion": False}),
}
"""By bytes of an element. `maxnreg`: else ptxas spills a little, to have more programs on a processor."""


@dataclass(frozen=True, slots=True)
class Items:
    """Tiles of queries that are attended in one schedule."""

    items: torch.Tensor  # int32 [num_items, 5], as in the kernel
    num_splits: int  # the most that one item has
    num_programs: int  # that take an item's splits in turn


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    walked: Items  # a program takes all keys
    split: Items  # several programs take its splits
    split_rows: torch.Tensor  # int32 [num_split_tokens, 2]: query row, number of keys
    block_tables: torch.Tensor  # int64 [num_seqs, max_num_blocks], contiguous
    group: int
    tile: Tile


def _tile(element_bytes: int, group: int) -> Tile:
    tile = TILES[element_bytes]
    return tile if group <= tile.rows else Tile(power_of_two(group), tile.keys, tile.options)


def plan_attention(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int,
) -> AttentionPlan:
    """As `ops.plan_attention`. Tiles have the size that suits queries in the pool's dtype; others are served, too."""
    _, _, _, num_kv_heads, _, head_dim = kv_cache.shape
    group = num_heads // num_kv_heads
    tile = _tile(kv_cache.element_size(), group)
    tokens = tile.rows // group
    spans = [
        (i, start, stop, context_lens[i]) for i, (start, stop) in enumerate(pairwise(query_starts)) if stop > start
    ]
    short = [span for span in spans if span[2] - span[1] <= tokens and span[3] + span[2] - span[1] > SPLIT_KEYS]
    num_splits = max((-(-(context + stop - start) // SPLIT_KEYS) for _, start, stop, context in short), default=0)
    num_split_tokens = sum(stop - start for _, start, stop, _ in short)
    if _scratch_bytes(num_split_tokens, num_splits, num_heads, head_dim) > MAX_SCRATCH_BYTES:
        short = []
    alone = {span[0] for span in short}
    walked: list[tuple[int, ...]] = []
    split: list[tuple[int, ...]] = []
    split_rows: list[tuple[int, ...]] = []
    for i, start, stop, context in spans:
        if i in alone:
            split.append((i, start, stop - start, context, len(split_rows)))
            split_rows += [(row, context + row - start + 1) for row in range(start, stop)]
            continue
        for first in range(start, stop, tokens):
            walked.append((i, first, min(tokens, stop - first), context + first - start, 0))
    walked.sort(key=lambda item: -item[3] - item[2])  # the longest first: programs end at about the same time
    device = block_tables.device
    num_splits = num_splits if split else 1
    return AttentionPlan(
        walked=Items(_int32(walked, 5, device), 1, 1),
        split=Items(_int32(split, 5, device), num_splits, num_splits),
        split_rows=_int32(split_rows, 2, device),
        block_tables=block_tables.contiguous(),
        group=group,
        tile=tile,
    )


def plan_decodes(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, num_heads: int
) -> AttentionPlan:
    """As `ops.plan_decodes`: all sequences in one schedule, for as many splits as their block tables have room for."""
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_rows, max_num_blocks = block_tables.shape
    num_splits = -(-max_num_blocks * block_size // SPLIT_KEYS)
    num_programs = max(1, GRAPH_PROGRAMS // (num_rows * num_kv_heads))
    row = torch.arange(num_rows, dtype=torch.int32, device=block_tables.device)
    context = context_lens.to(torch.int32)
    items = torch.stack((row, row, torch.ones_like(row), context, row), 1)
    split_rows = torch.stack((row, context + 1), 1)
    if _scratch_bytes(num_rows, num_splits, num_heads, head_dim) > MAX_SCRATCH_BYTES:
        walked, split, split_rows = Items(items, 1, 1), Items(items[:0], 1, 1), split_rows[:0]
    else:
        walked, split = Items(items[:0], 1, 1), Items(items, num_splits, min(num_splits, num_programs))
    group = num_heads // num_kv_heads
    tile = _tile(kv_cache.element_size(), group)
    return AttentionPlan(walked, split, split_rows, block_tables.contiguous(), group, tile)


def _scratch_bytes(num_tokens: int, num_splits: int, num_heads: int, head_dim: int) -> int:
    return num_tokens * num_splits * num_heads * head_dim * 4


def _int32(rows: Sequence[tuple[int, ...]], width: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).view(-1, width).to(device)


def paged_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """`query` [num_tokens, num_heads, head_dim] with contiguous heads -> the same shape, contiguous."""
    out = query.new_empty(query.shape)
    num_heads, head_dim = query.shape[1:]
    shape = len(plan.split_rows), num_heads, plan.split.num_splits
    partial = query.new_empty(*shape, head_dim, dtype=torch.float32)
    stats = query.new_empty(*shape, 2, dtype=torch.float32)
    for items, is_split in ((plan.walked, False), (plan.split, True)):
        _attend(query, kv_cache, layer, out, partial, stats, plan, items, scale, is_split)
    launch(
        jit.merge_splits,
        (len(plan.split_rows), num_heads),
        partial,
        stats,
        out,
        plan.split_rows,
        plan.split.num_splits,
        num_heads=num_heads,
        head_dim=head_dim,
        dim=power_of_two(head_dim),
        split=SPLIT_KEYS,
        options={"num_warps": 1, "enable_fp_fusion": False},
    )
    return out


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    out: torch.Tensor,
    partial: torch.Tensor,
    stats: torch.Tensor,
    plan: AttentionPlan,
    items: Items,
    scale: float,
    is_split: bool,
) -> None:
    _, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    tile = plan.tile
    launch(
        jit.paged_attention,
        (len(items.items), num_kv_heads, items.num_programs),
        query,
        kv_cache,
        out,
        partial,
        stats,
        items.items,
        plan.block_tables,
        scale * math.log2(math.e),
        layer * kv_cache.stride(1),
        query.stride(0),
        kv_cache.stride(0),
        plan.block_tables.shape[1],
        items.num_splits,
        group=plan.group,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        dim=max(16, power_of_two(head_dim)),
        rows=tile.rows,
        tile=tile.keys,
        split=SPLIT_KEYS,
        is_split=is_split,
        options=tile.options,
    )
