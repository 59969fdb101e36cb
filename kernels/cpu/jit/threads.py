"""What threads of a team do beside computing: take work, wait for each other, call what they were given."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvferry.kernels.cpu.jit.memory import pointer

_I64, _I32 = ir.IntType(64), ir.IntType(32)


@intrinsic
def arrive(typing_context: Any, address: Any) -> Any:
    """Adds 1 to the integer at `address`: who reads that by `load_shared` sees all that was written before."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", pointer(builder, args[0], _I64), _I64(1), "acq_rel")

    return types.intp(types.intp), generate


@intrinsic
def load_shared(typing_context: Any, address: Any) -> Any:
    """The integer at `address`, which other threads change."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(pointer(builder, args[0], _I64), "acquire", 8)

    return types.intp(types.intp), generate


@intrinsic
def call_kernel(typing_context: Any, function: Any, argument: Any) -> Any:
    """`void (*)(int64_t)` at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64])
        builder.call(pointer(builder, args[0], kind), [args[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def call_plain(typing_context: Any, function: Any) -> Any:
    """`int (*)(void)` at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_I32, [])
        return builder.sext(builder.call(pointer(builder, args[0], kind), []), _I64)

    return types.intp(types.intp), generate
