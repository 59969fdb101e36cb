"""Products of small tiles, and the dense layer of few rows.

An element of a product is one chain of fused multiply-adds in the order of the inner dimension, whatever tile computes
it: so a row's bits depend on nothing but the row. `multiply_tile` is the only place where matrices are multiplied.
"""

from __future__ import annotations

from typing import Any

from kvferry.kernels.cpu.jit.constants import COLUMNS
from kvferry.kernels.cpu.jit.memory import F32, load_float, load_int, prefetch, take_next
from kvferry.kernels.cpu.jit.simd import add, called, fma, inlined, load, splat, store

SUM_BLOCK = 1024
"""So many products are summed in one chain; the chains are then added in order. As oneDNN does on AVX2."""

_INNER = 64

CACHE_LINE = 64
"""Weights of so many inner positions stay in the first-level cache while all rows use them."""


def _one_row(width: int) -> Any:
    @inlined
    def multiply(a, b, b_stride, c, count, fresh):
        total = load(c, width)
        if fresh:
            total = splat(0.0, width)
        for _ in range(count):
            total = fma(splat(load_float(a), width), load(b, width), total)
            a += F32
            b += b_stride
        store(c, total)

    return multiply


def _four_rows(width: int) -> Any:
    @inlined
    def multiply(a, a_stride, b, b_stride, c, c_stride, count, fresh, after, step):
        if fresh:
            t0 = t1 = t2 = t3 = splat(0.0, width)
        else:
            t0 = load(c, width)
            t1 = load(c + c_stride, width)
            t2 = load(c + 2 * c_stride, width)
            t3 = load(c + 3 * c_stride, width)
        for _ in range(count):
            column = load(b, width)
            prefetch(after)
            after += step
            t0 = fma(splat(load_float(a), width), column, t0)
            t1 = fma(splat(load_float(a + a_stride), width), column, t1)
            t2 = fma(splat(load_float(a + 2 * a_stride), width), column, t2)
            t3 = fma(splat(load_float(a + 3 * a_stride), width), column, t3)
            a += F32
            b += b_stride
        store(c, t0)
        store(c + c_stride, t1)
        store(c + 2 * c_stride, t2)
        store(c + 3 * c_stride, t3)

    return multiply


@inlined
def _three_by_32(a, a_stride, b, b_stride, c, c_stride, count, fresh, after, step):
    c1, c2 = c + c_stride, c + 2 * c_stride
    if fresh:
        p0 = p1 = p2 = p3 = q0 = q1 = q2 = q3 = r0 = r1 = r2 = r3 = splat(0.0, 8)
    else:
        p0, p1, p2, p3 = load(c, 8), load(c + 32, 8), load(c + 64, 8), load(c + 96, 8)
        q0, q1, q2, q3 = load(c1, 8), load(c1 + 32, 8), load(c1 + 64, 8), load(c1 + 96, 8)
        r0, r1, r2, r3 = load(c2, 8), load(c2 + 32, 8), load(c2 + 64, 8), load(c2 + 96, 8)
    for _ in range(count):
        prefetch(after)
        prefetch(after + step // 2)
        after += step
        x, y, z = splat(load_float(a), 8), splat(load_float(a + a_stride), 8), splat(load_float(a + 2 * a_stride), 8)
        column = load(b, 8)  # a register at a time: twelve hold sums
        p0, q0, r0 = fma(x, column, p0), fma(y, column, q0), fma(z, column, r0)
        column = load(b + 32, 8)
        p1, q1, r1 = fma(x, column, p1), fma(y, column, q1), fma(z, column, r1)
        column = load(b + 64, 8)
        p2, q2, r2 = fma(x, column, p2), fma(y, column, q2), fma(z, column, r2)
        column = load(b + 96, 8)
        p3, q3, r3 = fma(x, column, p3), fma(y, column, q3), fma(z, column, r3)
        a += F32
        b += b_stride
    for at, p, q, r in ((0, p0, q0, r0), (32, p1, q1, r1), (64, p2, q2, r2), (96, p3, q3, r3)):
        store(c + at, p)
        store(c1 + at, q)
        store(c2 + at, r)


_one_by_64, _one_by_8, _one_by_1 = _one_row(64), _one_row(8), _one_row(1)
_four_by_16, _four_by_8, _four_by_1 = _four_rows(16), _four_rows(8), _four_rows(1)


@called
def multiply_tile(a, a_stride, rows, b, b_stride, columns, c, c_stride, count, fresh, after, size):
    """`c[rows, columns] (+)= a[rows, count] @ b[count, columns]`; `fresh` begins at 0. Strides are bytes per row.

    At `after` lie `[count, columns]` numbers of `size` bytes that will be read next: they are fetched on the way, each
    row's products a share. One or two rows do not fetch.
    """
    four_step, three_step = 64 * size // max(rows, 4), 96 * size // max(rows, 3)
    threes = -rows % 4
    if 3 * threes > rows or columns % 32 != 0:
        threes = 0
    while rows >= 4 + 3 * threes:
        at = 0
        while at + 16 <= columns:
            _four_by_16(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, four_step)
            after += count * four_step
            at += 16
        while at + 8 <= columns:
            _four_by_8(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, four_step)
            at += 8
        while at < columns:
            _four_by_1(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, four_step)
            at += 1
        a += 4 * a_stride
        c += 4 * c_stride
        rows -= 4
    for _ in range(threes):
        for at in range(0, columns, 32):
            _three_by_32(a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after, three_step)
            after += count * three_step
        a += 3 * a_stride
        c += 3 * c_stride
        rows -= 3
    while rows > 0:
        at = 0
        while at + 64 <= columns:
            _one_by_64(a, b + at * F32, b_stride, c + at * F32, count, fresh)
            at += 64
        while at + 8 <= columns:
            _one_by_8(a, b + at * F32, b_stride, c + at * F32, count, fresh)
            at += 8
        while at < columns:
            _one_by_1(a, b + at * F32, b_stride, c + at * F32, count, fresh)
            at += 1
        a += a_stride
        c += c_stride
        rows -= 1


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
    inner = _INNER if rows > 1 else SUM_BLOCK
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
