"""Who attends to what in one step on a CPU, as indices made once and used by every layer.

Sequences with one query row (decodes) become a work list of (sequence, tile of keys) items, longest sequence first and
tile by tile, so that tile j of all sequences that have one is a contiguous stretch:

    sequences, sorted    a a a a      items   [a0 b0 c0] [a1 b1] [a2] [a3]
                         b b                   tile 0     1       2    3
                         c                    sums over tiles are adds of stretches, in order, without padding

Longer chunks keep their keys in order, one tile after the other. Keys and values are taken out of the pool by a flat
index of *pieces*: as many neighbouring slots of one head as a block and a tile share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kvferry.kernels.reference import KV_TILE

_SLICE_BYTES = 2**19
"""Keys or values of decodes that are gathered at once: the copy should stay in the cores' second-level caches."""


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
class ItemSlice:
    """Items `[start, stop)` of the work list, and what to blank among their gathered slots."""

    start: int
    stop: int
    empty_slots: torch.Tensor  # indices into the slice's [items * num_kv_heads * KV_TILE] slots


@dataclass(frozen=True, slots=True)
class Decodes:
    """n sequences with one query row each, by falling number of tiles; W items in all."""

    rows: torch.Tensor  # [n] rows of the query
    counts: tuple[int, ...]  # per tile, how many of the sequences have it: falling, counts[0] == n
    item_seq: torch.Tensor  # [W] which sequence an item belongs to
    hidden: torch.Tensor  # [W, 1, KV_TILE] bool: positions past the sequence's end
    pieces: torch.Tensor  # [W, num_kv_heads * pieces per tile]
    slices: tuple[ItemSlice, ...]


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
    decodes: Decodes | None
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
    seqs = sorted((i for i, n in enumerate(query_lens) if n == 1), key=lambda i: -context_lens[i])
    rows = torch.tensor([query_starts[i] for i in seqs])
    num_keys = [context_lens[i] + 1 for i in seqs]
    decodes = _plan_decodes(shape, block_tables[seqs], rows, num_keys) if seqs else None
    return AttentionPlan(shape, decodes, chunks)


def num_tiles(num_keys: int) -> int:
    return -(-num_keys // KV_TILE)


def _plan_chunk(shape: PoolShape, block_table: torch.Tensor, start: int, stop: int, context_len: int) -> Chunk:
    width = num_tiles(context_len + stop - start) * KV_TILE
    first = torch.arange(0, width, shape.piece).unsqueeze(0)
    return Chunk(start, stop, context_len, shape.index(block_table, first).flatten())


def _plan_decodes(shape: PoolShape, block_tables: torch.Tensor, rows: torch.Tensor, num_keys: Sequence[int]) -> Decodes:
    """For sequences by falling number of keys."""
    tiles = [num_tiles(n) for n in num_keys]
    counts = tuple(sum(n > j for n in tiles) for j in range(tiles[0]))
    item_seq = torch.cat([torch.arange(n) for n in counts])
    tile_start = torch.repeat_interleave(torch.arange(len(counts)) * KV_TILE, torch.tensor(counts))
    positions = tile_start[:, None] + torch.arange(KV_TILE)
    hidden = positions >= torch.tensor(num_keys)[item_seq][:, None]
    pieces = shape.index(block_tables[item_seq], positions[:, :: shape.piece])
    step = max(1, _SLICE_BYTES // (shape.num_kv_heads * KV_TILE * shape.head_dim * 4))
    slices = []
    for start in range(0, len(item_seq), step):
        stop = min(start + step, len(item_seq))
        empty = hidden[start:stop, None].expand(-1, shape.num_kv_heads, -1).flatten().nonzero().flatten()
        slices.append(ItemSlice(start, stop, empty))
    return Decodes(rows, counts, item_seq, hidden.unsqueeze(1), pieces.flatten(1), tuple(slices))
