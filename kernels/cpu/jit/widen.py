"""Narrow numbers in memory, float32 in registers: loads that widen, which is exact, and stores that round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvferry.kernels.cpu.jit.simd import Vector, columns_8x8

_FLOAT, _I32, _I16 = ir.FloatType(), ir.IntType(32), ir.IntType(16)


def _widened(kind: ir.Type, size: int, emit: Callable[..., ir.Value]) -> Any:
    """Loads numbers of `size` bytes as float32, which holds each of them exactly."""

    def typed(typing_context: Any, address: Any, width: Any) -> Any:
        vector = Vector(width.literal_value)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            narrow = builder.load(builder.inttoptr(args[0], ir.VectorType(kind, vector.width).as_pointer()), align=size)
            return emit(builder, narrow, vector.width)

        return vector(types.intp, width), generate

    return intrinsic(prefer_literal=True)(typed)


def _rounded(emit: Callable[..., ir.Value]) -> Any:
    """Stores float32 as numbers of two bytes."""

    def typed(typing_context: Any, address: Any, vector: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            narrow = emit(builder, args[1], vector.width)
            builder.store(narrow, builder.inttoptr(args[0], narrow.type.as_pointer()), align=2)
            return context.get_dummy_value()

        return types.void(types.intp, vector), generate

    return intrinsic(typed)


def _from_bfloat16(builder: ir.IRBuilder, narrow: ir.Value, width: int) -> ir.Value:
    """A bfloat16 is the upper half of a float32."""
    whole = ir.VectorType(_I32, width)
    high = builder.shl(builder.zext(narrow, whole), ir.Constant(whole, [16] * width))
    return builder.bitcast(high, ir.VectorType(_FLOAT, width))


def _to_bfloat16(builder: ir.IRBuilder, x: ir.Value, width: int) -> ir.Value:
    """To the nearest, of two the even one; what lies past the largest becomes infinite, NaN stays NaN."""
    whole = ir.VectorType(_I32, width)

    def constant(value: int) -> ir.Constant:
        return ir.Constant(whole, [value] * width)

    bits = builder.bitcast(x, whole)
    is_odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    high = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), is_odd), constant(16))
    high = builder.select(builder.fcmp_unordered("uno", x, x), constant(0x7FC0), high)
    return builder.trunc(high, ir.VectorType(_I16, width))


def _from_float16(builder: ir.IRBuilder, narrow: ir.Value, width: int) -> ir.Value:
    return builder.fpext(narrow, ir.VectorType(_FLOAT, width))


def _to_float16(builder: ir.IRBuilder, x: ir.Value, width: int) -> ir.Value:
    """Rounds as `_to_bfloat16` does."""
    return builder.fptrunc(x, ir.VectorType(ir.HalfType(), width))


def _from_int8(builder: ir.IRBuilder, narrow: ir.Value, width: int) -> ir.Value:
    return builder.sitofp(builder.sext(narrow, ir.VectorType(_I32, width)), ir.VectorType(_FLOAT, width))


load_int8 = _widened(ir.IntType(8), 1, _from_int8)
load_bfloat16, load_float16 = _widened(_I16, 2, _from_bfloat16), _widened(ir.HalfType(), 2, _from_float16)
store_bfloat16, store_float16 = _rounded(_to_bfloat16), _rounded(_to_float16)
columns_bfloat16 = columns_8x8(_I16, 2, _from_bfloat16)
columns_float16 = columns_8x8(ir.HalfType(), 2, _from_float16)
