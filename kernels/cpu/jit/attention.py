"""Paged attention: fixed tiles of keys from position 0, read through the block table, with a running softmax.

A row's bits depend on its query, its keys and values, and their positions alone: which rows share a tile of queries,
and whether they came as a decode or as part of a chunk, only decides what is computed next to it.
"""

from __future__ import annotations

import math

from kvferry.kernels.cpu.jit.constants import FLOAT32, KV_TILE
from kvferry.kernels.cpu.jit.few_rows import FEW_ROWS, GROUP, NUM_GROUPS, add_few_values, fetch, list_groups, score_few
from kvferry.kernels.cpu.jit.kv import LINE, size_of, widen, write_columns
from kvferry.kernels.cpu.jit.matmul import multiply_tile
from kvferry.kernels.cpu.jit.memory import F32, load_float, load_int, store_float, store_int, take_next
from kvferry.kernels.cpu.jit.simd import (
    add,
    div,
    exp_of,
    first_lanes,
    greater,
    inlined,
    load,
    max_lanes,
    mul,
    splat,
    store,
    sub,
    sum_lanes,
)
from kvferry.kernels.cpu.jit.threads import load_shared

ITEM_INTS = 4
"""A work item: first query row, number of tokens, context length, address of the block table."""

_exp8, _exp1 = exp_of(8), exp_of(1)


def paged_attention(args):
    """See `kernels/cpu/attention.py` for the arguments. One item of work is a query tile of one kv head."""
    num_kv_heads, items = load_int(args + 80), load_int(args + 104)
    num_items = load_int(args + 112) * num_kv_heads
    scratch = load_int(args + 120) + take_next(args + 8) * load_int(args + 128)
    item = take_next(args)
    while item < num_items:
        _attend(args, items + item // num_kv_heads * ITEM_INTS * 8, item % num_kv_heads, scratch)
        item = take_next(args)


@inlined
def _attend(args, item, kv_head, scratch):
    query, query_stride, scale = load_int(args + 16), load_int(args + 24), load_float(args + 32)
    value_bytes, out, num_heads = load_int(args + 56), load_int(args + 64), load_int(args + 72)
    group, head_dim = num_heads // load_int(args + 80), load_int(args + 96)
    first_row, num_tokens, context_len = load_int(item), load_int(item + 8), load_int(item + 16)
    num_rows, row_bytes = num_tokens * group, head_dim * F32
    kind = load_int(args + 136)
    pool = _pool(args, kv_head, load_int(item + 24), head_dim * size_of(kind))
    # Scratch: where keys lie, twice; transposed keys, queries, results, weights; per row 8 partial sums of weights and
    # the highest score.
    groups, after = scratch, scratch + NUM_GROUPS * 8
    keys = scratch + 2 * NUM_GROUPS * 8
    queries = keys + head_dim * LINE
    results = queries + num_rows * row_bytes
    weights = results + num_rows * row_bytes
    sums = weights + num_rows * LINE
    highest = sums + num_rows * 8 * F32
    for row in range(num_rows):
        source = query + (first_row + row // group) * query_stride + (kv_head * group + row % group) * row_bytes
        _multiply(source, queries + row * row_bytes, head_dim, scale)
        _clear(results + row * row_bytes, head_dim)
        store(sums + row * 8 * F32, splat(0.0, 8))
        store_float(highest + row * F32, -math.inf)
    num_keys = context_len + num_tokens
    few = num_rows <= FEW_ROWS and pool[2] % GROUP == 0 and head_dim % GROUP == 0
    if few:
        list_groups(pool, 0, num_keys, groups)
    for start in range(0, num_keys, KV_TILE):
        count = min(KV_TILE, num_keys - start)
        done = max(0, start - context_len) * group  # rows whose own position lies before this tile
        rows, seeing, tile = num_rows - done, queries + done * row_bytes, weights + done * LINE
        if few:
            if start + KV_TILE < num_keys:
                list_groups(pool, start + KV_TILE, num_keys, after)
            else:
                _list_upcoming(args, groups, after)
            score_few(seeing, row_bytes, rows, groups, count, after, head_dim, tile, kind)
        else:
            _transpose_keys(pool, value_bytes, head_dim, start, count, keys, kind)
            multiply_tile(seeing, row_bytes, rows, keys, LINE, KV_TILE, tile, LINE, head_dim, True, keys, 0)
        for row in range(done, num_rows):
            visible = min(KV_TILE, context_len + row // group + 1 - start)
            total, result = sums + row * 8 * F32, results + row * row_bytes
            _soften(weights + row * LINE, visible, highest + row * F32, total, result, head_dim)
        sums_of = results + done * row_bytes
        if few:
            add_few_values(groups, value_bytes, count, after, head_dim, tile, rows, sums_of, keys, kind)
            groups, after = after, groups
        else:
            _add_values(pool, value_bytes, head_dim, start, num_keys, tile, rows, sums_of, keys, kind)
    for row in range(num_rows):
        target = out + ((first_row + row // group) * num_heads + kv_head * group + row % group) * row_bytes
        _finish(results + row * row_bytes, target, head_dim, sum_lanes(load(sums + row * 8 * F32, 8)))


@inlined
def _list_upcoming(args, groups, after):
    """The first groups of the item that is most likely taken next, or `groups` again: what is fetched meanwhile."""
    num_kv_heads, upcoming = load_int(args + 80), load_shared(args)
    if upcoming < load_int(args + 112) * num_kv_heads:
        item = load_int(args + 104) + upcoming // num_kv_heads * ITEM_INTS * 8
        row_bytes = load_int(args + 96) * size_of(load_int(args + 136))
        pool = _pool(args, upcoming % num_kv_heads, load_int(item + 24), row_bytes)
        list_groups(pool, 0, load_int(item + 8) + load_int(item + 16), after)
    else:
        for i in range(NUM_GROUPS):
            store_int(after + i * 8, load_int(groups + i * 8))


@inlined
def _pool(args, kv_head, table, row_bytes):
    """Where the keys of one sequence and head lie: address, bytes per block, slots per block, table, bytes per slot."""
    block_size = load_int(args + 88)
    return load_int(args + 40) + kv_head * block_size * row_bytes, load_int(args + 48), block_size, table, row_bytes


@inlined
def _slot(pool, position):
    """The address of a position's key."""
    address, block_bytes, block_size, table, row_bytes = pool
    return address + load_int(table + position // block_size * 8) * block_bytes + position % block_size * row_bytes


@inlined
def _run(pool, position, stop):
    """How many positions of `[position, stop)` lie side by side in the first one's block."""
    return min(pool[2] - position % pool[2], stop - position)


@inlined
def _transpose_keys(pool, value_bytes, head_dim, start, count, keys, kind):
    """Keys `[start, start + count)` -> columns of `keys` [head_dim, KV_TILE]; the other columns keep what they held."""
    at = 0
    while at < count:
        run, source = _run(pool, start + at, start + count), _slot(pool, start + at)
        fetch(source + value_bytes, run * pool[4])
        write_columns(source, run, head_dim, keys + at * F32, kind)
        at += run


@inlined
def _add_values(pool, value_bytes, head_dim, start, num_keys, weights, rows, results, wide, kind):
    """Adds the tile's weighted values, one block after the other; narrow ones through `wide` [KV_TILE, head_dim]."""
    row_bytes = head_dim * F32
    at, stop = start, min(start + KV_TILE, num_keys)
    while at < stop:
        run, values = _run(pool, at, stop), _slot(pool, at) + value_bytes
        if at + KV_TILE < num_keys:
            fetch(_slot(pool, at + KV_TILE), _run(pool, at + KV_TILE, num_keys) * pool[4])
        if kind == FLOAT32:
            tile = weights + (at - start) * F32
            multiply_tile(tile, LINE, rows, values, row_bytes, head_dim, results, row_bytes, run, False, values, 0)
        else:
            widen(values, wide + (at - start) * row_bytes, run * head_dim, kind)
        at += run
    if kind != FLOAT32:
        multiply_tile(weights, LINE, rows, wide, row_bytes, head_dim, results, row_bytes, stop - start, False, wide, 0)


@inlined
def _multiply(source, target, count, factor):
    """`target = source * factor`; they may be the same."""
    at = 0
    while at + 8 <= count:
        store(target + at * F32, mul(load(source + at * F32, 8), splat(factor, 8)))
        at += 8
    while at < count:
        store(target + at * F32, mul(load(source + at * F32, 1), splat(factor, 1)))
        at += 1


@inlined
def _clear(target, count):
    for at in range(count):
        store_float(target + at * F32, 0.0)


@inlined
def _soften(scores, visible, highest, sums, result, head_dim):
    """Scores become weights, those past `visible` 0; what was summed so far is rescaled to the new maximum."""
    top = splat(-math.inf, 8)
    at = 0
    while at < visible:
        top = greater(first_lanes(load(scores + at * F32, 8), visible - at, splat(-math.inf, 8)), top)
        at += 8
    before = load(highest, 1)
    now = greater(splat(max_lanes(top), 1), before)
    store(highest, now)
    total = load(sums, 8)
    if sum_lanes(now) != sum_lanes(before):
        shrink = sum_lanes(_exp1(sub(before, now)))
        total = mul(total, splat(shrink, 8))
        _multiply(result, result, head_dim, shrink)
    peak = splat(sum_lanes(now), 8)
    at = 0
    while at < KV_TILE:
        weight = splat(0.0, 8)
        if at < visible:
            weight = first_lanes(_exp8(sub(load(scores + at * F32, 8), peak)), visible - at, weight)
        store(scores + at * F32, weight)
        total = add(total, weight)
        at += 8
    store(sums, total)


@inlined
def _finish(source, target, count, total):
    """Divides by the sum of weights. `+ 0.0`: where hidden keys were added with weight 0, a sum is never -0."""
    at = 0
    while at + 8 <= count:
        store(target + at * F32, add(div(load(source + at * F32, 8), splat(total, 8)), splat(0.0, 8)))
        at += 8
    while at < count:
        store(target + at * F32, add(div(load(source + at * F32, 1), splat(total, 1)), splat(0.0, 1)))
        at += 1
