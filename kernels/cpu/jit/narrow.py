"""The dense layer over weights of one or two bytes, which become float32 on their way to the multiplier.

A weight that was widened (and scaled) is the same number for few rows, in a register, and for many, from a small tile:
the sums are those of `matmul.dense` over such weights, in the same order, bit for bit.
"""

from __future__ import annotations

from typing import Any

from kvferry.kernels.cpu.jit.constants import BFLOAT16, COLUMNS, INT8, OFFSET_INT8, WEIGHT_TILE
from kvferry.kernels.cpu.jit.matmul import SUM_BLOCK, add_chain, copy, multiply_tile, next_rows
from kvferry.kernels.cpu.jit.memory import F32, load_int, prefetch, take_next
from kvferry.kernels.cpu.jit.simd import called, fma, inlined, load, mul, store
from kvferry.kernels.cpu.jit.tiles import add_outer, load_rows, store_rows, zero_rows
from kvferry.kernels.cpu.jit.widen import load_bfloat16, load_float16, load_int8

_STRIDE = COLUMNS * F32
"""Bytes of a row of sums, and of what a group is scaled by: a float32 for each column, or two float16."""

_FEW_ROWS, _FEW_ROWS_16_BIT = 8, 12
"""Up to here a weight is widened in a register each time that it is used, beyond once, into a tile in memory."""


def _int8(width: int) -> Any:
    @inlined
    def factors(scales):
        return (load(scales, width),)

    @inlined
    def widened(address, factors):
        return mul(load_int8(address, width), factors[0])

    return factors, widened


def _offset_int8(width: int) -> Any:
    """Scales are float16, and offsets, which follow a group's scales."""

    @inlined
    def factors(scales):
        return load_float16(scales, width), load_float16(scales + COLUMNS * 2, width)

    @inlined
    def widened(address, factors):
        return fma(load_int8(address, width), factors[0], factors[1])

    return factors, widened


def _plain(load_widened: Any) -> Any:
    def form(width: int) -> Any:
        @inlined
        def factors(scales):
            return (scales,)

        @inlined
        def widened(address, factors):
            return load_widened(address, width)

        return factors, widened

    return form


_bfloat16, _float16 = _plain(load_bfloat16), _plain(load_float16)


def _rows_by(rows: int, width: int, widening: Any, size: int, scale_size: int) -> Any:
    """`c[rows, COLUMNS] (+)= a[rows, count] @ b[count, COLUMNS]` over weights of `size` bytes, `width` at a time."""
    (factors, widened), fetches = widening(width), rows > 2  # what comes next, which hardware foresees for others

    @called
    def multiply(a, a_stride, b, scales, c, count, fresh):
        for at in range(0, COLUMNS, width):
            sums = zero_rows(rows, width) if fresh else load_rows(c + at * F32, _STRIDE, rows, width)
            number, weights, after = a, b + at * size, b + count * (COLUMNS + at) * size
            scaling = factors(scales + at * scale_size)
            for _ in range(count):
                if fetches:
                    prefetch(after)
                    after += width * size
                sums = add_outer(sums, number, a_stride, widened(weights, scaling))
                number += F32
                weights += COLUMNS * size
            store_rows(c + at * F32, _STRIDE, sums)

    return multiply


def _few_rows(widening: Any, size: int, scale_size: int = F32) -> Any:
    shapes = (1, 64), (2, 32), (3, 16), (4, 16), (6, 16)
    one, two, three, four, six = (_rows_by(*shape, widening, size, scale_size) for shape in shapes)

    @inlined
    def multiply(rows, a, a_stride, b, scales, c, count, fresh):
        while rows > 0:
            taken = next_rows(rows)
            if taken == 1:
                one(a, a_stride, b, scales, c, count, fresh)
            elif taken == 2:
                two(a, a_stride, b, scales, c, count, fresh)
            elif taken == 3:
                three(a, a_stride, b, scales, c, count, fresh)
            elif taken == 4:
                four(a, a_stride, b, scales, c, count, fresh)
            else:
                six(a, a_stride, b, scales, c, count, fresh)
            a += taken * a_stride
            c += taken * _STRIDE
            rows -= taken

    return multiply


def _tile(widening: Any, size: int) -> Any:
    """`tile[count, COLUMNS]` in float32 from the weights at `b`."""
    factors, widened = widening(COLUMNS)

    @called
    def write(b, scales, tile, count):
        scaling = factors(scales)
        for _ in range(count):
            store(tile, widened(b, scaling))
            b += COLUMNS * size
            tile += _STRIDE

    return write


_rows_int8, _rows_offset_int8 = _few_rows(_int8, 1), _few_rows(_offset_int8, 1, 2)
_rows_bfloat16, _rows_float16 = _few_rows(_bfloat16, 2), _few_rows(_float16, 2)
_tile_int8, _tile_offset_int8 = _tile(_int8, 1), _tile(_offset_int8, 1)
_tile_bfloat16, _tile_float16 = _tile(_bfloat16, 2), _tile(_float16, 2)


def narrow_dense(args):
    """`out = x @ weight.T`. See `kernels/cpu/narrow.py` for the arguments."""
    x, packed, scales, out = load_int(args + 16), load_int(args + 24), load_int(args + 32), load_int(args + 40)
    rows, width, num_columns = load_int(args + 48), load_int(args + 56), load_int(args + 64)
    kind, group = load_int(args + 80), load_int(args + 88)
    scratch = load_int(args + 72) + take_next(args + 8) * (rows * 2 + WEIGHT_TILE) * _STRIDE
    size = 1 if kind in (INT8, OFFSET_INT8) else 2
    num_groups = (width + group - 1) // group
    block = take_next(args)
    while block * COLUMNS < num_columns:
        weights = packed + block * width * COLUMNS * size
        _block(x, rows, width, weights, size, scales + block * num_groups * _STRIDE, scratch, kind, group)
        columns = min(COLUMNS, num_columns - block * COLUMNS)
        for row in range(rows):
            copy(scratch + row * _STRIDE, out + (row * num_columns + block * COLUMNS) * F32, columns)
        block = take_next(args)


@inlined
def _block(x, rows, width, weights, size, scales, scratch, kind, group):
    """`COLUMNS` columns of the product -> the first `rows` rows of `scratch`."""
    tile, chain = scratch + rows * 2 * _STRIDE, scratch
    is_few = rows <= (_FEW_ROWS if size == 1 else _FEW_ROWS_16_BIT)
    for start in range(0, width, SUM_BLOCK):
        stop = min(start + SUM_BLOCK, width)
        for at in range(start, stop, WEIGHT_TILE):
            count, fresh = min(WEIGHT_TILE, stop - at), at == start
            here, a = weights + at * COLUMNS * size, x + at * F32
            after = here + count * COLUMNS * size
            for done in range(0, count, group):
                part, scale = min(group, count - done), scales + (at + done) // group * _STRIDE
                narrow = here + done * COLUMNS * size
                if is_few:
                    _multiply(kind, rows, a + done * F32, width * F32, narrow, scale, chain, part, fresh and done == 0)
                else:
                    _widen(kind, narrow, scale, tile + done * _STRIDE, part)
            if not is_few:
                multiply_tile(a, width * F32, rows, tile, _STRIDE, COLUMNS, chain, _STRIDE, count, fresh, after, size)
        if start > 0:
            add_chain(scratch, chain, rows)
        chain = scratch + rows * _STRIDE


@inlined
def _multiply(kind, rows, a, a_stride, b, scales, c, count, fresh):
    if kind == INT8:
        _rows_int8(rows, a, a_stride, b, scales, c, count, fresh)
    elif kind == OFFSET_INT8:
        _rows_offset_int8(rows, a, a_stride, b, scales, c, count, fresh)
    elif kind == BFLOAT16:
        _rows_bfloat16(rows, a, a_stride, b, scales, c, count, fresh)
    else:
        _rows_float16(rows, a, a_stride, b, scales, c, count, fresh)


@inlined
def _widen(kind, b, scales, tile, count):
    if kind == INT8:
        _tile_int8(b, scales, tile, count)
    elif kind == OFFSET_INT8:
        _tile_offset_int8(b, scales, tile, count)
    elif kind == BFLOAT16:
        _tile_bfloat16(b, scales, tile, count)
    else:
        _tile_float16(b, scales, tile, count)
