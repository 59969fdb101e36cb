"""Rows of bytes from one place to another, past the cache where they are many.

A store that goes to memory by itself does not first read the line that it replaces, which is a third of what a plain
copy moves.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvferry.kernels.cpu.jit.memory import load_int, prefetch
from kvferry.kernels.cpu.jit.simd import inlined

LINE, PAGE = 64, 4096

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _move(kind: ir.Type, align: int, *, past_cache: bool = False) -> Any:
    """Copies one `kind` from `source`, anywhere, to `target`, which is a multiple of `align`."""

    def typed(typing_context: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[1], kind.as_pointer()), align=1)
            store = builder.store(value, builder.inttoptr(args[0], kind.as_pointer()), align=align)
            if past_cache:
                store.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return intrinsic(typed)


_LINE = ir.VectorType(_I64, LINE // 8)
_move_line = _move(_LINE, 1)
_move_line_past_cache = _move(_LINE, LINE, past_cache=True)
_move_byte = _move(_I8, 1)


@intrinsic
def _fence(typing_context: Any) -> Any:
    """What was written past the cache is in memory before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@inlined
def _copy(target, source, count, past_cache):
    at = 0
    if past_cache:
        while at < count and (target + at) % LINE != 0:
            _move_byte(target + at, source + at)
            at += 1
        while at + 4 * LINE <= count:  # unrolled: a tenth faster
            if at % PAGE < 4 * LINE:  # once per page: the next ones' addresses are translated meanwhile, a tenth again
                prefetch(source + at + PAGE)
                prefetch(target + at + PAGE)
            for line in range(4):
                _move_line_past_cache(target + at + line * LINE, source + at + line * LINE)
            at += 4 * LINE
    while at + LINE <= count:
        _move_line(target + at, source + at)
        at += LINE
    while at < count:
        _move_byte(target + at, source + at)
        at += 1


def copy_rows(args):
    """For the arguments see `kernels/cpu/rows.py`."""
    source, source_row, source_plane = load_int(args + 16), load_int(args + 24), load_int(args + 32)
    target, target_row, target_plane = load_int(args + 40), load_int(args + 48), load_int(args + 56)
    source_ids, target_ids, num_rows = load_int(args + 64), load_int(args + 72), load_int(args + 80)
    num_planes, plane_bytes, past_cache = load_int(args + 88), load_int(args + 96), load_int(args + 104)
    for i in range(num_rows):
        read = source + load_int(source_ids + i * 8) * source_row
        write = target + load_int(target_ids + i * 8) * target_row
        for plane in range(num_planes):
            _copy(write + plane * target_plane, read + plane * source_plane, plane_bytes, past_cache)
    _fence()
