"""Loads of narrow numbers as vectors of float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvferry.kernels.cpu.jit.simd import Vector

_FLOAT, _I32 = ir.FloatType(), ir.IntType(32)


def _widened(kind: ir.Type, size: int, emit: Callable[..., ir.Value]) -> Any:
    """Loads numbers of `size` bytes as float32, which holds each of them exactly."""

    def typed(typing_context: Any, address: Any, width: Any) -> Any:
        vector = Vector(width.literal_value)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            narrow = builder.load(builder.inttoptr(args[0], ir.VectorType(kind, vector.width).as_pointer()), align=size)
            return emit(builder, narrow, vector.width)

        return vector(types.intp, width), generate

    return intrinsic(prefer_literal=True)(typed)


def _from_bfloat16(builder: ir.IRBuilder, narrow: ir.Value, width: int) -> ir.Value:
    """A bfloat16 is the upper half of a float32."""
    whole = ir.VectorType(_I32, width)
    high = builder.shl(builder.zext(narrow, whole), ir.Constant(whole, [16] * width))
    return builder.bitcast(high, ir.VectorType(_FLOAT, width))


def _from_int8(builder: ir.IRBuilder, narrow: ir.Value, width: int) -> ir.Value:
    return builder.sitofp(builder.sext(narrow, ir.VectorType(_I32, width)), ir.VectorType(_FLOAT, width))


load_int8 = _widened(ir.IntType(8), 1, _from_int8)
load_bfloat16 = _widened(ir.IntType(16), 2, _from_bfloat16)
load_float16 = _widened(ir.HalfType(), 2, lambda builder, x, width: builder.fpext(x, ir.VectorType(_FLOAT, width)))
