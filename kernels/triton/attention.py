"""Paged attention on a GPU: a step's tiles of queries as a list, made once, and the launches of each layer.

A row's bits depend on that row alone; `jit/attention.py` says why. So it is free which tiles have their keys split
among programs: those of sequences whose queries fit one tile (decodes, and the tail of a prompt after a prefix hit),
as long as the scratch memory for it stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from kvferry.kernels.spread import Ints, spread
from kvferry.kernels.triton.jit import attention as jit
from kvferry.kernels.triton.launch import Option, launch, power_of_two

SPLIT_KEYS = 256
"""Keys of a split, counted from position 0. Part of the numerics: another number gives other bits."""

MAX_SCRATCH_BYTES = 256 * 2**20

GRAPH_PROGRAMS = 1024
"""Programs that share the splits of a captured decode step: a few for each processor of a large GPU."""

ALIGNMENT = 32
"""Each table of a plan begins at a multiple of so many int32, 128 B: kernels are compiled for the alignment
of their pointers."""

_NO_ITEMS, _NO_ROWS = np.empty((0, 5), dtype=np.int64), np.empty((0, 2), dtype=np.int64)


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
    starts, contexts = np.asarray(query_starts, dtype=np.int64), np.asarray(context_lens, dtype=np.int64)
    counts = starts[1:] - starts[:-1]
    num_keys, num_splits = contexts + counts, 1
    split = ((counts > 0) & (counts <= tokens) & (num_keys > SPLIT_KEYS)).nonzero()[0]  # the sequences
    if len(split):
        num_splits = -(-int(num_keys[split].max()) // SPLIT_KEYS)
        if _scratch_bytes(int(counts[split].sum()), num_splits, num_heads, head_dim) > MAX_SCRATCH_BYTES:
            split, num_splits = split[:0], 1
    split_items, split_rows = _split(starts, contexts, counts, split)
    counts[split] = 0
    walked_items = _walked(starts, contexts, counts, tokens)
    tables = _on_device(block_tables.device, walked_items, split_items, split_rows)
    return AttentionPlan(
        walked=Items(tables[0], 1, 1),
        split=Items(tables[1], num_splits, num_splits),
        split_rows=tables[2],
        block_tables=block_tables.contiguous(),
        group=group,
        tile=tile,
    )


def _walked(starts: Ints, contexts: Ints, counts: Ints, tokens: int) -> Ints:
    """[num_items, 5], as in the kernel, of `counts` query rows in tiles of `tokens`."""
    owners, nth = spread(-(-counts // tokens))
    if not len(owners):
        return _NO_ITEMS
    offsets = nth * tokens
    sizes, befores = np.minimum(counts[owners] - offsets, tokens), contexts[owners] + offsets
    items = np.array((owners, starts[owners] + offsets, sizes, befores, np.zeros_like(owners))).T
    return items[np.argsort(-befores - sizes, kind="stable")]  # the longest first: programs end at about the same time


def _split(starts: Ints, contexts: Ints, counts: Ints, seqs: Ints) -> tuple[Ints, Ints]:
    """[num_items, 5] and [num_split_tokens, 2], as in the kernels, of these sequences, each of one tile."""
    if not len(seqs):
        return _NO_ITEMS, _NO_ROWS
    starts, contexts, counts = starts[seqs], contexts[seqs], counts[seqs]
    owners, nth = spread(counts)
    items = np.array((seqs, starts, counts, contexts, counts.cumsum() - counts)).T
    return items, np.array((starts[owners] + nth, contexts[owners] + nth + 1)).T


def _on_device(device: torch.device, *tables: Ints) -> list[torch.Tensor]:
    """As int32, by one copy."""
    starts = list(accumulate((-(-table.size // ALIGNMENT) * ALIGNMENT for table in tables), initial=0))
    memory = np.empty(starts[-1], dtype=np.int32)
    for start, table in zip(starts, tables, strict=False):
        memory[start : start + table.size].reshape(table.shape)[:] = table
    whole = torch.from_numpy(memory).to(device)
    return [
        whole.as_strided(table.shape, (table.shape[1], 1), start) for start, table in zip(starts, tables, strict=False)
    ]


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
