"""Vectors of float32 for numba, by explicit LLVM instructions: nothing is left to an auto-vectoriser.

Every operation works lane by lane and rounds once, so an element has the same bits in a vector of any width. Memory is
addressed by integers, in bytes; nothing is checked here: the callers in `kernels/cpu` check shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from kvferry.kernels.cpu.jit.memory import F32, pointer

_FLOAT, _I64, _I32 = ir.FloatType(), ir.IntType(64), ir.IntType(32)

inlined = njit(forceinline=True, error_model="numpy")
"""Decorates a helper of a kernel; compiled with the kernel that calls it."""


called = njit(error_model="numpy")
"""Decorates a helper that is too large for that."""


class Vector(types.Type):
    """`width` float32 in registers."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(name=f"float32x{width}")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _llvm(vector))


def _llvm(vector: Vector) -> ir.VectorType:
    return ir.VectorType(_FLOAT, vector.width)


def _constant(vector: Vector, value: float) -> ir.Constant:
    return ir.Constant(_llvm(vector), [value] * vector.width)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def spread(builder: ir.IRBuilder, number: ir.Value, width: int) -> ir.Value:
    """A number in every lane."""
    one = builder.insert_element(ir.Constant(ir.VectorType(number.type, width), ir.Undefined), number, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(_I32, width), [0] * width))


@intrinsic(prefer_literal=True)
def load(typing_context: Any, address: Any, width: Any) -> Any:
    vector = Vector(width.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(pointer(builder, args[0], _llvm(vector)), align=F32)

    return vector(types.intp, width), generate


@intrinsic
def store(typing_context: Any, address: Any, vector: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], pointer(builder, args[0], _llvm(vector)), align=F32)
        return context.get_dummy_value()

    return types.void(types.intp, vector), generate


@intrinsic(prefer_literal=True)
def splat(typing_context: Any, value: Any, width: Any) -> Any:
    """A scalar in every lane."""
    vector = Vector(width.literal_value)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return spread(builder, args[0], vector.width)

    return vector(types.float32, width), generate


def _lanewise(emit: Callable[..., ir.Value], num_args: int) -> Any:
    """An operation on `num_args` vectors of one width."""

    def typed(vector: Vector) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, *args)

        return vector(*[vector] * num_args), generate

    if num_args == 1:
        return intrinsic(lambda typing_context, a: typed(a))
    if num_args == 2:
        return intrinsic(lambda typing_context, a, b: typed(a))
    return intrinsic(lambda typing_context, a, b, c: typed(a))


def _named(name: str) -> Callable[..., ir.Value]:
    """LLVM's intrinsic of that name."""

    def emit(builder: ir.IRBuilder, *args: ir.Value) -> ir.Value:
        kind = args[0].type
        return _call(builder, f"llvm.{name}.v{kind.count}f32", kind, *args)

    return emit


def _greater(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _power_of_two(builder: ir.IRBuilder, exponent: ir.Value) -> ir.Value:
    """2 ** a whole number between -126 and 128; 128 gives infinity."""
    whole = ir.VectorType(_I32, exponent.type.count)
    biased = builder.add(builder.fptosi(exponent, whole), ir.Constant(whole, [127] * whole.count))
    return builder.bitcast(builder.shl(biased, ir.Constant(whole, [23] * whole.count)), exponent.type)


add = _lanewise(lambda builder, a, b: builder.fadd(a, b), 2)
sub = _lanewise(lambda builder, a, b: builder.fsub(a, b), 2)
mul = _lanewise(lambda builder, a, b: builder.fmul(a, b), 2)
div = _lanewise(lambda builder, a, b: builder.fdiv(a, b), 2)
greater = _lanewise(_greater, 2)
lesser = _lanewise(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b), 2)
fused = _named("fma")
fma = _lanewise(fused, 3)
root = _lanewise(_named("sqrt"), 1)
nearest = _lanewise(_named("rint"), 1)
power_of_two = _lanewise(_power_of_two, 1)


@intrinsic
def first_lanes(typing_context: Any, vector: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of `vector`, the others from `other`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = signature.args[0].width
        whole = ir.VectorType(_I32, width)
        limit = spread(builder, builder.trunc(args[1], _I32), width)
        inside = builder.icmp_signed("<", ir.Constant(whole, list(range(width))), limit)
        return builder.select(inside, args[0], args[2])

    return vector(vector, types.intp, vector), generate


def _folded(emit: Callable[..., ir.Value]) -> Any:
    """All lanes (a power of two) combined into a scalar, halves first: a fixed tree."""

    def typed(typing_context: Any, vector: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, width = args[0], vector.width
            while width > 1:
                width //= 2
                low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
                high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
                value = emit(
                    builder, builder.shuffle_vector(value, value, low), builder.shuffle_vector(value, value, high)
                )
            return builder.extract_element(value, _I32(0))

        return types.float32(vector), generate

    return intrinsic(typed)


sum_lanes = _folded(lambda builder, a, b: builder.fadd(a, b))
max_lanes = _folded(_greater)


def columns_8x8(kind: ir.Type, size: int, widen: Callable[..., ir.Value]) -> Any:
    """The columns of 8 rows of 8 numbers of `size` bytes, one after the other; `stride` is bytes between rows."""

    def typed(typing_context: Any, source: Any, stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            def half(i: int, first: int) -> ir.Value:
                offset = builder.add(builder.mul(args[1], _I64(i)), _I64(first * size))
                return builder.load(pointer(builder, builder.add(args[0], offset), ir.VectorType(kind, 4)), align=size)

            def shuffle(a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
                return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

            columns = []
            for first in (0, 4):  # rows i and i + 4 side by side: what follows never crosses the halves of a register
                r = [widen(builder, shuffle(half(i, first), half(i + 4, first), list(range(8))), 8) for i in range(4)]
                low, high = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
                pairs = [shuffle(r[i], r[i + 1], lanes) for lanes in (low, high) for i in (0, 2)]
                low, high = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
                columns += [shuffle(pairs[i], pairs[i + 1], lanes) for i in (0, 2) for lanes in (low, high)]
            while len(columns) > 1:
                joined = list(range(2 * columns[0].type.count))
                columns = [shuffle(columns[i], columns[i + 1], joined) for i in range(0, len(columns), 2)]
            return columns[0]

        return Vector(64)(types.intp, types.intp), generate

    return intrinsic(typed)


def _column(builder: ir.IRBuilder, columns: ir.Value, i: int) -> ir.Value:
    lanes = ir.Constant(ir.VectorType(_I32, 8), list(range(8 * i, 8 * i + 8)))
    return builder.shuffle_vector(columns, columns, lanes)


@intrinsic
def store_columns(typing_context: Any, target: Any, stride: Any, columns: Any) -> Any:
    """Column i of `columns_8x8` becomes row i of `target`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i in range(8):
            row = builder.add(args[0], builder.mul(args[1], _I64(i)))
            builder.store(_column(builder, args[2], i), pointer(builder, row, ir.VectorType(_FLOAT, 8)), align=F32)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, columns), generate


@intrinsic
def add_products(typing_context: Any, total: Any, a: Any, columns: Any) -> Any:
    """`total` + a[0] * column 0 + ... + a[7] * column 7 of `columns_8x8`, one fused multiply-add after the other."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums = args[0]
        for i in range(8):
            number = builder.load(pointer(builder, builder.add(args[1], _I64(i * F32)), _FLOAT), align=F32)
            sums = fused(builder, spread(builder, number, 8), _column(builder, args[2], i), sums)
        return sums

    return total(total, types.intp, columns), generate


columns_float32 = columns_8x8(_FLOAT, F32, lambda builder, row, width: row)


def exp_of(width: int) -> Any:
    """e ** x for vectors of `width`: accurate between -87.3 and 88.3; below, as at -87.3; above, infinity."""

    @inlined
    def exp(x):
        x = greater(lesser(x, splat(89.0, width)), splat(-87.33, width))
        whole = nearest(mul(x, splat(1.4426950408889634, width)))
        # ln 2 in two parts, the first with so few bits that its product with `whole` is exact
        rest = fma(whole, splat(-0.693359375, width), x)
        rest = fma(whole, splat(2.12194440e-4, width), rest)
        p = fma(splat(1.9875691500e-4, width), rest, splat(1.3981999507e-3, width))
        p = fma(p, rest, splat(8.3334519073e-3, width))
        p = fma(p, rest, splat(4.1665795894e-2, width))
        p = fma(p, rest, splat(1.6666665459e-1, width))
        p = fma(p, rest, splat(5.0000001201e-1, width))
        p = add(fma(mul(rest, rest), p, rest), splat(1.0, width))
        return mul(p, power_of_two(whole))

    return exp
