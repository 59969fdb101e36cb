"""Single numbers in memory, which is addressed by integers, in bytes; prefetches, and the counter of work."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

F32 = 4
"""Bytes of a float32."""

_FLOAT, _I64, _I32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)


def pointer(builder: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    return builder.inttoptr(address, to.as_pointer())


def _scalar_load(kind: ir.Type, result: Any, align: int) -> Any:
    def typed(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.load(pointer(builder, args[0], kind), align=align)

        return result(types.intp), generate

    return intrinsic(typed)


load_float = _scalar_load(_FLOAT, types.float32, F32)
load_int = _scalar_load(_I64, types.intp, 8)
load_double = _scalar_load(ir.DoubleType(), types.float64, 8)


@intrinsic
def load_bits(typing_context: Any, address: Any) -> Any:
    """The bits of a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.zext(builder.load(pointer(builder, args[0], _I32), align=F32), _I64)

    return types.intp(types.intp), generate


@intrinsic
def store_float(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], _FLOAT), align=F32)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), generate


@intrinsic
def store_double(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], ir.DoubleType()), align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.float64), generate


@intrinsic
def store_int(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], _I64), align=8)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def prefetch(typing_context: Any, address: Any) -> Any:
    """Asks for the cache line at `address`, which need not be valid."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        line = pointer(builder, args[0], ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [line.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [line, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def take_next(typing_context: Any, address: Any) -> Any:
    """Adds 1 to the integer at `address`, atomically -> what it was: the next piece of work is the caller's alone."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], _I64), _I64(1), "monotonic")

    return types.intp(types.intp), generate
