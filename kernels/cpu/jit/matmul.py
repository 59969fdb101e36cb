"""Products of small tiles, and the dense layer over float32 weights.

An element of a product is one chain of fused multiply-adds in the order of the inner dimension, whatever tile computes
it: so a row's bits depend on nothing but the row. Float32 matrices are multiplied here and nowhere else.
"""

from __future__ import annotations

from typing import Any

from kvferry.kernels.cpu.jit.constants import COLUMNS, WEIGHT_TILE
from kvferry.kernels.cpu.jit.memory import F32, load_int, prefetch, take_next
from kvferry.kernels.cpu.jit.simd import add, called, inlined, load, store
from kvferry.kernels.cpu.jit.tiles import add_outer, load_rows, store_rows, zero_rows

SUM_BLOCK = 1024
"""So many products are summed in one chain; the chains are then added in order. As oneDNN does on AVX2."""

CACHE_LINE = 64


def _tile(rows: int, width: int, fetches: bool) -> Any:
    @inlined
    def multiply(a, a_stride, b, b_stride, c, c_stride, count, fresh, after, step):
        sums = zero_rows(rows, width) if fresh else load_rows(c, c_stride, rows, width)
        for _ in range(count):
            if fetches:
                prefetch(after)
                after += step
            sums = add_outer(sums, a, a_stride, load(b, width))
            a += F32
            b += b_stride
        store_rows(c, c_stride, sums)

    return multiply


_one_by_64, _one_by_8, _one_by_1 = _tile(1, 64, False), _tile(1, 8, False), _tile(1, 1, False)
_two_by_16, _three_by_16 = _tile(2, 16, True), _tile(3, 16, True)
_four_by_16, _four_by_8, _four_by_1 = _tile(4, 16, True), _tile(4, 8, True), _tile(4, 1, True)
_six_by_16 = _tile(6, 16, True)


@inlined
def next_rows(rows):
    """How many of `rows` are multiplied together next: 6, 4, 3, 2 or 1; the larger, the less is read per product."""
    if rows >= 6 and rows != 7 and rows != 8 and rows != 11:
        return 6
    if rows == 4 or rows > 5:
        return 4
    return min(rows, 3)


@called
def multiply_tile(a, a_stride, rows, b, b_stride, columns, c, c_stride, count, fresh, after, size):
    """`c[rows, columns] (+)= a[rows, count] @ b[count, columns]`; `fresh` begins at 0. Strides are bytes per row.

    At `after` lie `[count, columns]` numbers of `size` bytes that will be read next: they are fetched on the way, each
    row's products a share. One or two rows do not fetch, and walk memory in order, one by one.
    """
    all_rows, left = rows, rows
    while left > 0:
        taken = next_rows(left) if columns % 16 == 0 else 4
        if all_rows < 3 or taken > left:
            taken = 1
        step = 16 * taken * size // all_rows
        at = 0
        if taken == 6:
            while at < columns:
                _six_by_16(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                after += count * step
                at += 16
        elif taken == 4:
            while at + 16 <= columns:
                _four_by_16(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                after += count * step
                at += 16
            while at + 8 <= columns:
                _four_by_8(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                at += 8
            while at < columns:
                _four_by_1(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                at += 1
        elif taken == 3:
            while at < columns:
                _three_by_16(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                after += count * step
                at += 16
        elif taken == 2:
            while at < columns:
                _two_by_16(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                after += count * step
                at += 16
        else:
            while at + 64 <= columns:
                _one_by_64(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                at += 64
            while at + 8 <= columns:
                _one_by_8(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                at += 8
            while at < columns:
                _one_by_1(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, step)
                at += 1
        a += taken * a_stride
        c += taken * c_stride
        left -= taken


def dense(args):
    """`out = x @ weight.T` over packed weights. See `kernels/cpu/dense.py` for the arguments."""
    x, packed, out = load_int(args + 16), load_int(args + 24), load_int(args + 32)
    rows, width, num_columns = load_int(args + 40), load_int(args + 48), load_int(args + 56)
    scratch = load_int(args + 64) + take_next(args + 8) * rows * 2 * COLUMNS * F32
    block_bytes = width * COLUMNS * F32
    block = take_next(args)
    while block * COLUMNS < num_columns:
        _dense_block(x, rows, width, packed + block * block_bytes, scratch)
        columns = min(COLUMNS, num_columns - block * COLUMNS)
        for row in range(rows):
            copy(scratch + row * COLUMNS * F32, out + (row * num_columns + block * COLUMNS) * F32, columns)
        block = take_next(args)


@inlined
def _dense_block(x, rows, width, block, scratch):
    """`COLUMNS` columns of the product -> the first half of `scratch`."""
    stride = COLUMNS * F32
    inner = WEIGHT_TILE if rows > 1 else SUM_BLOCK
    chain = scratch
    for start in range(0, width, SUM_BLOCK):
        stop = min(start + SUM_BLOCK, width)
        for at in range(start, stop, inner):
            count = min(inner, stop - at)
            weights, after = block + at * stride, block + (at + count) * stride
            fresh = at == start
            multiply_tile(
                x + at * F32, width * F32, rows, weights, stride, COLUMNS, chain, stride, count, fresh, after, F32
            )
        if start > 0:
            add_chain(scratch, chain, rows)
        chain = scratch + rows * stride


@inlined
def add_chain(total, chain, rows):
    """`total += chain`, both `[rows, COLUMNS]`."""
    for i in range(0, rows * COLUMNS, 8):
        store(total + i * F32, add(load(total + i * F32, 8), load(chain + i * F32, 8)))


@inlined
def copy(source, target, count):
    at = 0
    while at + 8 <= count:
        store(target + at * F32, load(source + at * F32, 8))
        at += 8
    while at < count:
        store(target + at * F32, load(source + at * F32, 1))
        at += 1
