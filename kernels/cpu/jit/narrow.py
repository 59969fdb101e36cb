"""The dense layer over weights of one or two bytes, which become float32 on their way to the multiplier.

A weight that was widened (and scaled) is the same number for one row, straight from memory, and for many, from a small
tile: the sums are those of `matmul.dense` over such weights, in the same order, bit for bit.
"""

from __future__ import annotations

from typing import Any

from kvferry.kernels.cpu.jit.constants import BFLOAT16, COLUMNS, INT8
from kvferry.kernels.cpu.jit.matmul import SUM_BLOCK, add_chain, copy, multiply_tile
from kvferry.kernels.cpu.jit.memory import F32, load_float, load_int, take_next
from kvferry.kernels.cpu.jit.simd import called, fma, inlined, load, mul, splat, store
from kvferry.kernels.cpu.jit.widen import load_bfloat16, load_float16, load_int8

TILE = 64
"""Inner positions of the widened tile, which stays in the first-level cache."""


@inlined
def _int8(address, scales):
    return mul(load_int8(address, 8), load(scales, 8))


@inlined
def _bfloat16(address, scales):
    return load_bfloat16(address, 8)


@inlined
def _float16(address, scales):
    return load_float16(address, 8)


def _one_row(widen: Any, size: int) -> Any:
    """`c[COLUMNS] (+)= a[count] @ b[count, COLUMNS]` over weights of `size` bytes."""

    @called
    def multiply(a, b, scales, c, count, fresh):
        if fresh:
            t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = splat(0.0, 8)
        else:
            t0, t1, t2, t3 = load(c, 8), load(c + 32, 8), load(c + 64, 8), load(c + 96, 8)
            t4, t5, t6, t7 = load(c + 128, 8), load(c + 160, 8), load(c + 192, 8), load(c + 224, 8)
        for _ in range(count):
            x = splat(load_float(a), 8)
            t0 = fma(x, widen(b, scales), t0)
            t1 = fma(x, widen(b + 8 * size, scales + 32), t1)
            t2 = fma(x, widen(b + 16 * size, scales + 64), t2)
            t3 = fma(x, widen(b + 24 * size, scales + 96), t3)
            t4 = fma(x, widen(b + 32 * size, scales + 128), t4)
            t5 = fma(x, widen(b + 40 * size, scales + 160), t5)
            t6 = fma(x, widen(b + 48 * size, scales + 192), t6)
            t7 = fma(x, widen(b + 56 * size, scales + 224), t7)
            a += F32
            b += COLUMNS * size
        store(c, t0)
        store(c + 32, t1)
        store(c + 64, t2)
        store(c + 96, t3)
        store(c + 128, t4)
        store(c + 160, t5)
        store(c + 192, t6)
        store(c + 224, t7)

    return multiply


def _widened_tile(widen: Any, size: int) -> Any:
    """`tile[count, COLUMNS]` in float32 from the weights at `b`."""

    @called
    def write(b, scales, tile, count):
        for _ in range(count):
            for at in range(0, COLUMNS, 8):
                store(tile + at * F32, widen(b + at * size, scales + at * F32))
            b += COLUMNS * size
            tile += COLUMNS * F32

    return write


_row_int8, _row_bfloat16, _row_float16 = _one_row(_int8, 1), _one_row(_bfloat16, 2), _one_row(_float16, 2)
_tile_int8, _tile_bfloat16, _tile_float16 = (
    _widened_tile(_int8, 1),
    _widened_tile(_bfloat16, 2),
    _widened_tile(_float16, 2),
)


def narrow_dense(args):
    """`out = x @ weight.T`. See `kernels/cpu/narrow.py` for the arguments."""
    x, packed, scales, out = load_int(args + 16), load_int(args + 24), load_int(args + 32), load_int(args + 40)
    rows, width, num_columns = load_int(args + 48), load_int(args + 56), load_int(args + 64)
    kind, group = load_int(args + 80), load_int(args + 88)
    scratch = load_int(args + 72) + take_next(args + 8) * (rows * 2 + TILE) * COLUMNS * F32
    size = 1 if kind == INT8 else 2
    num_groups = (width + group - 1) // group
    block = take_next(args)
    while block * COLUMNS < num_columns:
        weights = packed + block * width * COLUMNS * size
        _block(x, rows, width, weights, size, scales + block * num_groups * COLUMNS * F32, scratch, kind, group)
        columns = min(COLUMNS, num_columns - block * COLUMNS)
        for row in range(rows):
            copy(scratch + row * COLUMNS * F32, out + (row * num_columns + block * COLUMNS) * F32, columns)
        block = take_next(args)


@inlined
def _block(x, rows, width, weights, size, scales, scratch, kind, group):
    """`COLUMNS` columns of the product -> the first `rows` rows of `scratch`."""
    stride = COLUMNS * F32
    tile, inner, chain = scratch + rows * 2 * stride, min(TILE, group), scratch
    for start in range(0, width, SUM_BLOCK):
        stop = min(start + SUM_BLOCK, width)
        for at in range(start, stop, inner):
            count, fresh = min(inner, stop - at), at == start
            here, scale = weights + at * COLUMNS * size, scales + at // group * stride
            if rows == 1:
                _multiply_row(x + at * F32, here, scale, chain, count, fresh, kind)
            else:
                _widen(here, scale, tile, count, kind)
                after = here + count * COLUMNS * size
                multiply_tile(
                    x + at * F32, width * F32, rows, tile, stride, COLUMNS, chain, stride, count, fresh, after, size
                )
        if start > 0:
            add_chain(scratch, chain, rows)
        chain = scratch + rows * stride


@inlined
def _multiply_row(a, b, scales, c, count, fresh, kind):
    if kind == INT8:
        _row_int8(a, b, scales, c, count, fresh)
    elif kind == BFLOAT16:
        _row_bfloat16(a, b, scales, c, count, fresh)
    else:
        _row_float16(a, b, scales, c, count, fresh)


@inlined
def _widen(b, scales, tile, count, kind):
    if kind == INT8:
        _tile_int8(b, scales, tile, count)
    elif kind == BFLOAT16:
        _tile_bfloat16(b, scales, tile, count)
    else:
        _tile_float16(b, scales, tile, count)
