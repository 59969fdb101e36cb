"""Paged attention on a CPU in few large torch calls, with the bits of `reference.paged_attention`.

A plan is made once per step and used by every layer. Sequences with one query row (decodes) become a work list of
(sequence, tile of keys) items, longest sequence first and tile by tile, so that tile j of all sequences that have one
is a contiguous stretch:

    sequences, sorted    a a a a      items   [a0 b0 c0] [a1 b1] [a2] [a3]
                         b b                  \\_ tile 0 _/ \\ 1 _/
                         c                    sums over tiles are adds of stretches, in order, without padding

Longer chunks are cut into tiles of queries that share the sequence's gathered keys. Keys and values are gathered out of
the pool by a flat index of *pieces*: as many neighbouring slots of one head as a block and a tile share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from kvferry.kernels.reference import KV_TILE, ROW_MULTIPLE

_QUERY_TILE = 64
"""Query tokens of a chunk that are attended together: bounds the scores that exist at once."""

_GROUP_ITEMS = 256
"""(sequence, tile) items of decodes that are gathered together: bounds the copy, and keeps it in cache."""


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The numbers of a pool `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, in pieces."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @classmethod
    def of(cls, kv_cache: torch.Tensor) -> PoolShape:
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        return cls(num_layers, num_kv_heads, block_size, head_dim)

    @property
    def piece(self) -> int:
        return math.gcd(self.block_size, KV_TILE)

    def pieces(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[num_pieces, piece * head_dim], no copy."""
        return kv_cache.view(-1, self.piece * self.head_dim)

    def offset(self, layer: int, kv: int) -> int:
        """What to add to a piece index of layer 0's keys."""
        return (2 * layer + kv) * self.num_kv_heads * (self.block_size // self.piece)

    def index(self, block_table: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Pieces of layer 0's keys that hold positions from `first` on.

        `block_table` [n, blocks], `first` [n, pieces] -> [n, num_kv_heads, pieces]. Positions past the table are taken
        from its last block: the caller masks them.
        """
        per_head = self.block_size // self.piece
        column = (first // self.block_size).clamp(max=block_table.shape[1] - 1)
        block = block_table.gather(1, column)
        head = torch.arange(self.num_kv_heads).view(1, -1, 1)
        inside = (first % self.block_size) // self.piece
        block_pieces = self.num_layers * 2 * self.num_kv_heads * per_head
        return (block * block_pieces + inside)[:, None, :] + head * per_head


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query row each, sorted by falling number of tiles; W items in all."""

    rows: torch.Tensor  # [n] rows of the query
    counts: tuple[int, ...]  # per tile, how many of the sequences have it: falling, counts[0] == n
    item_seq: torch.Tensor  # [W] which sequence an item belongs to
    hidden: torch.Tensor  # [W, 1, KV_TILE] bool: positions past the sequence's end
    pieces: torch.Tensor  # [W * num_kv_heads * pieces per tile]
    empty_slots: torch.Tensor  # rows of the gathered [W * num_kv_heads * KV_TILE, head_dim] values to set to 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence with several query rows."""

    start: int
    stop: int
    context_len: int
    pieces: torch.Tensor  # [num_kv_heads * pieces of all tiles]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    shape: PoolShape
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]


def plan_attention(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, query_starts: Sequence[int], context_lens: Sequence[int]
) -> AttentionPlan:
    shape = PoolShape.of(kv_cache)
    query_lens = [stop - start for start, stop in pairwise(query_starts)]
    chunks = tuple(
        _plan_chunk(shape, block_tables[i : i + 1], query_starts[i], query_starts[i + 1], context_lens[i])
        for i, query_len in enumerate(query_lens)
        if query_len > 1
    )
    decodes = sorted((i for i, n in enumerate(query_lens) if n == 1), key=lambda i: -_num_tiles(context_lens[i] + 1))
    groups, group, num_items = [], list[int](), 0
    for i in decodes:
        tiles = _num_tiles(context_lens[i] + 1)
        if group and num_items + tiles > _GROUP_ITEMS:
            groups.append(_plan_decodes(shape, group, block_tables, query_starts, context_lens))
            group, num_items = [], 0
        group.append(i)
        num_items += tiles
    if group:
        groups.append(_plan_decodes(shape, group, block_tables, query_starts, context_lens))
    return AttentionPlan(shape, tuple(groups), chunks)


def _num_tiles(num_keys: int) -> int:
    return -(-num_keys // KV_TILE)


def _plan_chunk(shape: PoolShape, block_table: torch.Tensor, start: int, stop: int, context_len: int) -> Chunk:
    width = _num_tiles(context_len + stop - start) * KV_TILE
    first = torch.arange(0, width, shape.piece).unsqueeze(0)
    return Chunk(start, stop, context_len, shape.index(block_table, first).flatten())


def _plan_decodes(
    shape: PoolShape,
    seqs: list[int],
    block_tables: torch.Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
) -> DecodeGroup:
    tiles = [_num_tiles(context_lens[i] + 1) for i in seqs]
    counts = tuple(sum(n > j for n in tiles) for j in range(tiles[0]))
    item_seq = torch.cat([torch.arange(n) for n in counts])
    tile_start = torch.repeat_interleave(torch.arange(len(counts)) * KV_TILE, torch.tensor(counts))
    seq_index = torch.tensor(seqs)
    num_keys = torch.tensor([context_lens[i] + 1 for i in seqs])
    positions = tile_start[:, None] + torch.arange(KV_TILE)
    hidden = positions >= num_keys[item_seq][:, None]
    pieces = shape.index(block_tables[seq_index[item_seq]], positions[:, :: shape.piece])
    every_head = hidden[:, None, :].expand(-1, shape.num_kv_heads, -1).reshape(-1)
    return DecodeGroup(
        rows=torch.tensor([query_starts[i] for i in seqs]),
        counts=counts,
        item_seq=item_seq,
        hidden=hidden.unsqueeze(1),
        pieces=pieces.flatten(),
        empty_slots=every_head.nonzero().flatten(),
    )


def paged_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    out = torch.empty_like(query)
    scaled = query.float() * scale
    pool = plan.shape.pieces(kv_cache)
    for group in plan.decodes:
        out[group.rows] = _attend_decodes(scaled[group.rows], pool, layer, plan.shape, group).to(out.dtype)
    for chunk in plan.chunks:
        _attend_chunk(scaled, pool, layer, plan.shape, chunk, out)
    return out


def _attend_decodes(
    query: torch.Tensor, pool: torch.Tensor, layer: int, shape: PoolShape, group: DecodeGroup
) -> torch.Tensor:
    """`query` [n, num_heads, head_dim] -> the same shape."""
    num_seqs, num_heads, head_dim = query.shape
    num_kv_heads, num_items = shape.num_kv_heads, len(group.item_seq)
    tiles = (num_items * num_kv_heads, KV_TILE, head_dim)
    key = pool.index_select(0, group.pieces + shape.offset(layer, 0)).view(tiles).float()
    value = pool.index_select(0, group.pieces + shape.offset(layer, 1)).view(-1, head_dim).float()
    value = value.index_fill_(0, group.empty_slots, 0).view(tiles)
    rows = query.view(num_seqs, num_kv_heads, -1, head_dim)
    rows = F.pad(rows, (0, 0, 0, -rows.shape[2] % ROW_MULTIPLE))
    item_rows = rows[group.item_seq].flatten(0, 1)  # [items * num_kv_heads, padded group, head_dim]

    weights = torch.bmm(item_rows, key.transpose(1, 2)).view(num_items, -1, KV_TILE)
    weights.masked_fill_(group.hidden, -torch.inf)
    highest = _over_tiles(_maximum_, weights.amax(-1), group.counts)
    weights = weights.sub_(highest[group.item_seq].unsqueeze(-1)).exp_()
    total = _over_tiles(torch.Tensor.add_, weights.sum(-1), group.counts)
    out = torch.bmm(weights.view(item_rows.shape[0], -1, KV_TILE), value)
    out = _over_tiles(torch.Tensor.add_, out.view(num_items, -1, head_dim), group.counts)
    out = (out + 0.0) / total.unsqueeze(-1)  # + 0.0: a sum of tiles that begins at 0, as a chunk's does, is never -0
    return out.view(rows.shape)[:, :, : num_heads // num_kv_heads].reshape(query.shape)


def _maximum_(into: torch.Tensor, other: torch.Tensor) -> None:
    torch.maximum(into, other, out=into)


def _over_tiles(
    op_: Callable[[torch.Tensor, torch.Tensor], object], items: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Combines, in place and in order of tiles, the stretches of `items` -> one entry per sequence."""
    first, *rest = torch.split(items, list(counts))
    for stretch in rest:
        op_(first[: len(stretch)], stretch)
    return first


def _attend_chunk(
    query: torch.Tensor, pool: torch.Tensor, layer: int, shape: PoolShape, chunk: Chunk, out: torch.Tensor
) -> None:
    """Writes rows `[chunk.start, chunk.stop)` of `out`."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = shape.num_kv_heads
    key = pool.index_select(0, chunk.pieces + shape.offset(layer, 0)).view(num_kv_heads, -1, head_dim).float()
    value = pool.index_select(0, chunk.pieces + shape.offset(layer, 1)).view(num_kv_heads, -1, head_dim).float()
    value[:, chunk.context_len + chunk.stop - chunk.start :] = 0
    for start in range(chunk.start, chunk.stop, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, chunk.stop)
        first = chunk.context_len + start - chunk.start  # position of the tile's first query
        width = _num_tiles(first + stop - start) * KV_TILE
        rows = query[start:stop].view(stop - start, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
        rows = F.pad(rows, (0, 0, 0, -rows.shape[1] % ROW_MULTIPLE))
        weights = torch.bmm(rows, key[:, :width].transpose(1, 2))
        own = torch.arange(rows.shape[1]) // (num_heads // num_kv_heads)
        weights[:, :, first:].masked_fill_(torch.arange(width - first) > own[:, None], -torch.inf)
        weights = weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        sums = weights.view(*rows.shape[:2], -1, KV_TILE).sum(-1)
        total, attended = torch.zeros_like(sums[..., 0]), torch.zeros_like(rows)
        for tile in range(width // KV_TILE):
            keys = slice(tile * KV_TILE, (tile + 1) * KV_TILE)
            total += sums[..., tile]
            attended += torch.bmm(weights[:, :, keys], value[:, keys])
        attended = (attended / total.unsqueeze(-1))[:, : (stop - start) * (num_heads // num_kv_heads)]
        out[start:stop] = attended.view(num_kv_heads, stop - start, -1, head_dim).transpose(0, 1).flatten(1, 2)
