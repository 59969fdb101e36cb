"""Keys and values as the pool keeps them: read as float32, rounded when written.

A number of two bytes is read as the float32 that equals it, so attention over such a pool has the bits of attention
over a float32 pool of the rounded numbers.
"""

from __future__ import annotations

from typing import Any

from kvferry.kernels.cpu.jit.constants import BFLOAT16, FLOAT32, KV_TILE
from kvferry.kernels.cpu.jit.matmul import copy
from kvferry.kernels.cpu.jit.memory import F32
from kvferry.kernels.cpu.jit.simd import called, columns_float32, inlined, load, store, store_columns
from kvferry.kernels.cpu.jit.widen import (
    columns_bfloat16,
    columns_float16,
    load_bfloat16,
    load_float16,
    store_bfloat16,
    store_float16,
)

LINE = KV_TILE * F32
"""Bytes of one row of transposed keys."""


@inlined
def size_of(kind):
    """Bytes of a number."""
    return F32 if kind == FLOAT32 else 2


def _columns(read: Any, columns: Any, size: int) -> Any:
    """Rows `[count, head_dim]` -> the first columns of `target` [head_dim, KV_TILE]."""

    @called
    def write(source, count, head_dim, target):
        row_bytes = head_dim * size
        at = 0
        while at < count:
            step = 8 if at + 8 <= count else 1
            dim = 0
            while step == 8 and dim + 8 <= head_dim:
                store_columns(target + dim * LINE + at * F32, LINE, columns(source + dim * size, row_bytes))
                dim += 8
            while dim < head_dim:
                for i in range(step):
                    store(target + dim * LINE + (at + i) * F32, read(source + i * row_bytes + dim * size, 1))
                dim += 1
            at += step
            source += step * row_bytes

    return write


def _copied(read: Any, write: Any, read_size: int, write_size: int) -> Any:
    """`count` numbers of one size become numbers of another."""

    @called
    def convert(source, target, count):
        at = 0
        while at + 8 <= count:
            write(target + at * write_size, read(source + at * read_size, 8))
            at += 8
        while at < count:
            write(target + at * write_size, read(source + at * read_size, 1))
            at += 1

    return convert


_columns_float32 = _columns(load, columns_float32, F32)
_columns_bfloat16 = _columns(load_bfloat16, columns_bfloat16, 2)
_columns_float16 = _columns(load_float16, columns_float16, 2)
_widen_bfloat16, _widen_float16 = _copied(load_bfloat16, store, 2, F32), _copied(load_float16, store, 2, F32)
_round_bfloat16, _round_float16 = _copied(load, store_bfloat16, F32, 2), _copied(load, store_float16, F32, 2)


@inlined
def write_columns(source, count, head_dim, target, kind):
    if kind == FLOAT32:
        _columns_float32(source, count, head_dim, target)
    elif kind == BFLOAT16:
        _columns_bfloat16(source, count, head_dim, target)
    else:
        _columns_float16(source, count, head_dim, target)


@inlined
def widen(source, target, count, kind):
    """`count` numbers of two bytes -> float32."""
    if kind == BFLOAT16:
        _widen_bfloat16(source, target, count)
    else:
        _widen_float16(source, target, count)


@inlined
def put(source, target, count, kind):
    """`count` float32 -> the pool's numbers."""
    if kind == FLOAT32:
        copy(source, target, count)
    elif kind == BFLOAT16:
        _round_bfloat16(source, target, count)
    else:
        _round_float16(source, target, count)
