"""Products of small tiles, and the dense layer of few rows.

An element of a product is one chain of fused multiply-adds in the order of the inner dimension, whatever tile computes
it: so a row's bits depend on nothing but the row. `multiply_tile` is the only place where matrices are multiplied.
"""

from __future__ import annotations

from typing import Any

from kvferry.kernels.cpu.jit.constants import COLUMNS, WIDTH_MULTIPLE
from kvferry.kernels.cpu.jit.simd import (
    F32,
    add,
    called,
    fma,
    inlined,
    load,
    load_float,
    load_int,
    prefetch,
    splat,
    store,
    take_next,
)

SUM_BLOCK = 1024
"""oneDNN sums so many products in one chain; the chains are then added in order."""

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
    def multiply(a, a_stride, b, b_stride, c, c_stride, count, fresh, after):
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
            after += CACHE_LINE
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


_one_by_64, _one_by_8, _one_by_1 = _one_row(64), _one_row(8), _one_row(1)
_four_by_16, _four_by_8, _four_by_1 = _four_rows(16), _four_rows(8), _four_rows(1)


@called
def multiply_tile(a, a_stride, rows, b, b_stride, columns, c, c_stride, count, fresh, after):
    """`c[rows, columns] (+)= a[rows, count] @ b[count, columns]`; `fresh` begins at 0. Strides are bytes per row.

    `after` is where the memory lies that will be read next: it is fetched on the way.
    """
    while rows >= 4:
        at = 0
        while at + 16 <= columns:
            _four_by_16(
                a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after + at * count * F32
            )
            at += 16
        while at + 8 <= columns:
            _four_by_8(
                a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after + at * count * F32
            )
            at += 8
        while at < columns:
            _four_by_1(
                a, a_stride, b + at * F32, b_stride, c + at * F32, c_stride, count, fresh, after + at * count * F32
            )
            at += 1
        a += 4 * a_stride
        c += 4 * c_stride
        rows -= 4
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
    """`out = x @ weight.T`, with the bits of oneDNN. See `kernels/cpu/dense.py` for the arguments."""
    x, packed, out = load_int(args + 16), load_int(args + 24), load_int(args + 32)
    rows, width, num_columns = load_int(args + 40), load_int(args + 48), load_int(args + 56)
    scratch = load_int(args + 64) + take_next(args + 8) * rows * 2 * COLUMNS * F32
    block_bytes = (width + WIDTH_MULTIPLE - 1) // WIDTH_MULTIPLE * WIDTH_MULTIPLE * COLUMNS * F32
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
            multiply_tile(x + at * F32, width * F32, rows, weights, stride, COLUMNS, chain, stride, count, fresh, after)
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
