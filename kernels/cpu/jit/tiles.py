"""Sums of several rows and columns that stay in registers while an inner dimension is walked: `rows` vectors."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvferry.kernels.cpu.jit.memory import F32, pointer
from kvferry.kernels.cpu.jit.simd import Vector, fused, spread

_FLOAT = ir.FloatType()


@intrinsic(prefer_literal=True)
def zero_rows(typing_context: Any, rows: Any, width: Any) -> Any:
    tile = types.UniTuple(Vector(width.literal_value), rows.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(ir.VectorType(_FLOAT, width.literal_value), [0.0] * width.literal_value)
        return context.make_tuple(builder, tile, [zero] * tile.count)

    return tile(rows, width), generate


@intrinsic(prefer_literal=True)
def load_rows(typing_context: Any, address: Any, stride: Any, rows: Any, width: Any) -> Any:
    """`stride` is bytes from row to row."""
    tile = types.UniTuple(Vector(width.literal_value), rows.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vectors, row = [], args[0]
        for _ in range(tile.count):
            vectors.append(builder.load(pointer(builder, row, ir.VectorType(_FLOAT, width.literal_value)), align=F32))
            row = builder.add(row, args[1])
        return context.make_tuple(builder, tile, vectors)

    return tile(types.intp, types.intp, rows, width), generate


@intrinsic
def store_rows(typing_context: Any, address: Any, stride: Any, tile: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row = args[0]
        for vector in cgutils.unpack_tuple(builder, args[2], tile.count):
            builder.store(vector, pointer(builder, row, vector.type), align=F32)
            row = builder.add(row, args[1])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, tile), generate


@intrinsic
def add_outer(typing_context: Any, tile: Any, a: Any, stride: Any, vector: Any) -> Any:
    """`tile[i] + a[i] * vector` for each row, by one fused multiply-add; `stride` is bytes from a[i] to the next."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, row = [], args[1]
        for total in cgutils.unpack_tuple(builder, args[0], tile.count):
            number = builder.load(pointer(builder, row, _FLOAT), align=F32)
            sums.append(fused(builder, spread(builder, number, total.type.count), args[3], total))
            row = builder.add(row, args[2])
        return context.make_tuple(builder, tile, sums)

    return tile(tile, types.intp, types.intp, vector), generate
