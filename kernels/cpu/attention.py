"""Paged attention on a CPU in few large torch calls, with the bits of `reference.paged_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from kvferry.kernels.cpu.attention_plan import AttentionPlan, Chunk, Decodes, PoolShape, num_tiles
from kvferry.kernels.cpu.invariance import num_threads
from kvferry.kernels.reference import HEAD_MULTIPLE, KV_TILE, QUERY_ROWS, padded

_QUERY_TILE = 64
"""Query tokens of a chunk that are attended together: bounds the scores that exist at once."""


def paged_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """`query` [num_tokens, num_heads, head_dim] -> like `query`."""
    head_dim = query.shape[-1]
    scaled = padded(query.float() * scale, 1, HEAD_MULTIPLE)
    # [num_tokens, num_kv_heads, num_heads / num_kv_heads, padded head_dim]: rows that share a kv head lie together
    rows = scaled.view(len(query), plan.shape.num_kv_heads, -1, scaled.shape[-1])
    out = torch.empty_like(rows)
    pool = Pool(kv_cache, layer, plan.shape)
    if plan.decodes is not None:
        out[plan.decodes.rows] = _attend_decodes(rows[plan.decodes.rows], pool, plan.decodes)
    for chunk in plan.chunks:
        _attend_chunk(rows, pool, chunk, out)
    return out[..., :head_dim].reshape(query.shape).to(query.dtype)


class Pool:
    """One layer's keys and values, copied out of the pool piece by piece."""

    def __init__(self, kv_cache: torch.Tensor, layer: int, shape: PoolShape) -> None:
        self._pieces = shape.pieces(kv_cache)
        self._head_dim = shape.head_dim
        self._offsets = shape.offset(layer, 0), shape.offset(layer, 1)

    def gather(self, pieces: torch.Tensor, kv: int) -> torch.Tensor:
        """[heads and tiles, KV_TILE, padded head_dim] float32, a copy."""
        tiles = self._pieces.index_select(0, pieces.flatten() + self._offsets[kv])
        return padded(tiles.view(-1, KV_TILE, self._head_dim).float(), 1, HEAD_MULTIPLE)


def _attend_decodes(rows: torch.Tensor, pool: Pool, plan: Decodes) -> torch.Tensor:
    """`rows` [n, num_kv_heads, heads per kv head, head_dim] -> the same shape."""
    group, head_dim = rows.shape[2:]
    filled = padded(rows, row_multiple(), 1)
    queries = filled[plan.item_seq]  # [items, num_kv_heads, padded group, head_dim]
    weights = queries.new_empty(*queries.shape[:3], KV_TILE)
    for part in plan.slices:
        items = slice(part.start, part.stop)
        key = pool.gather(plan.pieces[items], 0)
        torch.bmm(queries[items].flatten(0, 1), key.transpose(1, 2), out=weights[items].flatten(0, 1))
    flat = weights.view(len(weights), -1, KV_TILE).masked_fill_(plan.hidden, -torch.inf)
    highest = _over_tiles(_maximum_, flat.amax(-1), plan.counts)
    flat.sub_(highest[plan.item_seq].unsqueeze(-1)).exp_()
    total = _over_tiles(torch.Tensor.add_, flat.sum(-1), plan.counts)
    attended = torch.empty_like(queries)
    for part in plan.slices:
        items = slice(part.start, part.stop)
        value = pool.gather(plan.pieces[items], 1)
        value.view(-1, head_dim).index_fill_(0, part.empty_slots, 0)
        torch.bmm(weights[items].flatten(0, 1), value, out=attended[items].flatten(0, 1))
    out = _over_tiles(torch.Tensor.add_, attended.view(len(weights), -1, head_dim), plan.counts)
    out = (out + 0.0) / total.unsqueeze(-1)  # + 0.0: a sum of tiles that begins at 0, as a chunk's does, is never -0
    return out.view(filled.shape)[:, :, :group]


def _maximum_(into: torch.Tensor, other: torch.Tensor) -> None:
    torch.maximum(into, other, out=into)


def _over_tiles(
    combine_: Callable[[torch.Tensor, torch.Tensor], object], items: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Combines, in place and in order of tiles, the stretches of `items` -> one entry per sequence."""
    first, *rest = torch.split(items, list(counts))
    for stretch in rest:
        combine_(first[: len(stretch)], stretch)
    return first


def _attend_chunk(rows: torch.Tensor, pool: Pool, chunk: Chunk, out: torch.Tensor) -> None:
    """Writes `[chunk.start, chunk.stop)` of `out`, which is shaped like `rows`, one tile of queries after the other."""
    num_kv_heads, group, head_dim = rows.shape[1:]
    key, value = (pool.gather(chunk.pieces, kv).view(num_kv_heads, -1, head_dim) for kv in (0, 1))
    value[:, chunk.context_len + chunk.stop - chunk.start :] = 0
    for start in range(chunk.start, chunk.stop, _QUERY_TILE):
        stop = min(start + _QUERY_TILE, chunk.stop)
        first = chunk.context_len + start - chunk.start  # position of the tile's first query
        width = num_tiles(first + stop - start) * KV_TILE
        tile_rows = padded(rows[start:stop].transpose(0, 1).flatten(1, 2), row_multiple(), 1)
        weights = torch.bmm(tile_rows, key[:, :width].transpose(1, 2))
        own = torch.arange(tile_rows.shape[1]) // group
        weights[:, :, first:].masked_fill_(torch.arange(width - first) > own[:, None], -torch.inf)
        weights = weights.sub_(weights.amax(-1, keepdim=True)).exp_()
        sums = weights.view(*tile_rows.shape[:2], -1, KV_TILE).sum(-1)
        total, attended = torch.zeros_like(sums[..., 0]), torch.zeros_like(tile_rows)
        for tile in range(width // KV_TILE):
            keys = slice(tile * KV_TILE, (tile + 1) * KV_TILE)
            total += sums[..., tile]
            attended += torch.bmm(weights[:, :, keys], value[:, keys])
        attended = (attended / total.unsqueeze(-1))[:, : (stop - start) * group]
        out[start:stop] = attended.view(num_kv_heads, stop - start, group, head_dim).transpose(0, 1)


@cache
def row_multiple() -> int:
    """What query rows are padded to: as few as give the bits of whole `QUERY_ROWS` in this process."""
    return next((rows for rows in (4, 8, 16) if _has_same_bits(rows)), QUERY_ROWS)


def _has_same_bits(rows: int) -> bool:
    """Tries both products of attention with multiples of `rows` query rows, every index of a row, 1 and 2 threads."""
    generator = torch.Generator().manual_seed(rows)
    for inner, width in ((KV_TILE, 64), (KV_TILE, 80), (128, 5 * KV_TILE)):  # weights @ values twice, queries @ keys
        left = torch.randn(9, 2 * QUERY_ROWS, inner, generator=generator)
        right = torch.randn(9, inner, width, generator=generator)
        with num_threads(1):
            expected = torch.bmm(left, right)
        for threads in (1, 2):
            with num_threads(threads):
                for count in (1, 3, 9):
                    for start in range(rows):
                        part = slice(start, start + rows * count)
                        got = torch.bmm(left[:count, part].contiguous(), right[:count])
                        if not torch.equal(got, expected[:count, part]):
                            return False
    return True
