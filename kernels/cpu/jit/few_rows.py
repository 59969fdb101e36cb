"""Attention of few query rows over one tile of keys, read as they lie: what a decode does.

With many rows a tile of keys is transposed once for all of them; with few, each group of keys is turned in registers
just before it is used. Meanwhile the tile after it is fetched, a few lines at a time: memory and arithmetic overlap.
The products are those of `multiply_tile`, in its order.
"""

from __future__ import annotations

from typing import Any

from kvferry.kernels.cpu.jit.constants import BFLOAT16, FLOAT32, KV_TILE
from kvferry.kernels.cpu.jit.kv import LINE, size_of, widen
from kvferry.kernels.cpu.jit.matmul import CACHE_LINE, multiply_tile
from kvferry.kernels.cpu.jit.memory import F32, load_int, prefetch, store_int
from kvferry.kernels.cpu.jit.simd import add_products, called, columns_float32, inlined, splat, store
from kvferry.kernels.cpu.jit.widen import columns_bfloat16, columns_float16

FEW_ROWS = 4

GROUP = 8
"""Keys that lie side by side in a block: their scores are one vector. The address of group i is at `groups + 8 * i`."""

NUM_GROUPS = KV_TILE // GROUP


@inlined
def list_groups(pool, start, num_keys, groups):
    """Where the groups of keys of `[start, start + KV_TILE)` lie; of those past `num_keys` the last one before."""
    address, block_bytes, block_size, table, row_bytes = pool
    entry, slot = table + start // block_size * 8, start % block_size
    group = 0
    for i in range(NUM_GROUPS):
        if start + i * GROUP < num_keys:
            group = address + load_int(entry) * block_bytes + slot * row_bytes
        store_int(groups + i * 8, group)
        slot += GROUP
        if slot == block_size:
            entry += 8
            slot = 0


def _scores(columns: Any, size: int) -> Any:
    @called
    def score(queries, query_bytes, rows, first, second, head_dim, scores, after_first, after_second):
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = splat(0.0, GROUP)
        key_bytes = head_dim * size
        for _ in range(0, head_dim, 8):
            for line in range(0, size * 64, CACHE_LINE):
                prefetch(after_first + line)
                prefetch(after_second + line)
            keys = columns(first, key_bytes)
            a0 = add_products(a0, queries, keys)
            if rows > 1:
                a1 = add_products(a1, queries + query_bytes, keys)
            if rows > 2:
                a2 = add_products(a2, queries + 2 * query_bytes, keys)
            if rows > 3:
                a3 = add_products(a3, queries + 3 * query_bytes, keys)
            keys = columns(second, key_bytes)
            b0 = add_products(b0, queries, keys)
            if rows > 1:
                b1 = add_products(b1, queries + query_bytes, keys)
            if rows > 2:
                b2 = add_products(b2, queries + 2 * query_bytes, keys)
            if rows > 3:
                b3 = add_products(b3, queries + 3 * query_bytes, keys)
            queries += 8 * F32
            first += 8 * size
            second += 8 * size
            after_first += size * 64
            after_second += size * 64
        store(scores, a0)
        store(scores + GROUP * F32, b0)
        if rows > 1:
            store(scores + LINE, a1)
            store(scores + LINE + GROUP * F32, b1)
        if rows > 2:
            store(scores + 2 * LINE, a2)
            store(scores + 2 * LINE + GROUP * F32, b2)
        if rows > 3:
            store(scores + 3 * LINE, a3)
            store(scores + 3 * LINE + GROUP * F32, b3)

    return score


_scores_float32 = _scores(columns_float32, F32)
_scores_bfloat16, _scores_float16 = _scores(columns_bfloat16, 2), _scores(columns_float16, 2)


@inlined
def score_few(queries, query_bytes, rows, groups, count, after, head_dim, scores, kind):
    """`scores` [rows, KV_TILE] of the first `count` keys; the others are undefined. Fetches the keys `after`."""
    at = 0
    while at < count:
        i = at // GROUP * 8
        first, second = load_int(groups + i), load_int(groups + i + 8)
        after_first, after_second = load_int(after + i), load_int(after + i + 8)
        target = scores + at * F32
        if kind == FLOAT32:
            _scores_float32(queries, query_bytes, rows, first, second, head_dim, target, after_first, after_second)
        elif kind == BFLOAT16:
            _scores_bfloat16(queries, query_bytes, rows, first, second, head_dim, target, after_first, after_second)
        else:
            _scores_float16(queries, query_bytes, rows, first, second, head_dim, target, after_first, after_second)
        at += 2 * GROUP


@inlined
def add_few_values(groups, value_bytes, count, after, head_dim, weights, rows, results, wide, kind):
    """Adds the weighted values of `count` keys to `results`; narrow ones through `wide` [KV_TILE, head_dim]."""
    row_bytes, value_row = head_dim * F32, head_dim * size_of(kind)
    at = 0
    while at < count:
        values, run = load_int(groups + at), GROUP
        while at + run < count and load_int(groups + at + run) == values + run * value_row:
            run += GROUP
        run = min(run, count - at)
        ahead = load_int(after + at) + value_bytes
        values += value_bytes
        if kind == FLOAT32:
            if rows < 3:
                fetch(ahead, run * value_row)
            tile = weights + at * F32
            multiply_tile(tile, LINE, rows, values, row_bytes, head_dim, results, row_bytes, run, False, ahead, F32)
        else:
            fetch(ahead, run * value_row)
            widen(values, wide + at * row_bytes, run * head_dim, kind)
        at += run
    if kind != FLOAT32:
        multiply_tile(weights, LINE, rows, wide, row_bytes, head_dim, results, row_bytes, count, False, wide, 0)


@inlined
def fetch(address, size):
    """Asks for memory that will be read soon: blocks lie scattered, which no hardware foresees."""
    for line in range(0, size, CACHE_LINE):
        prefetch(address + line)
