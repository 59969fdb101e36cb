"""Everything of a layer between two matrix products that is no attention: norms, rotary with the KV write, SiLU.

Each piece of work is a run of rows. The order of a sum over a row is fixed by its width alone.
"""

from __future__ import annotations

from kvferry.kernels.cpu.jit.kv import put, size_of
from kvferry.kernels.cpu.jit.memory import F32, load_float, load_int, take_next
from kvferry.kernels.cpu.jit.simd import add, div, exp_of, fma, inlined, load, mul, root, splat, store, sub, sum_lanes

ROWS = 8
"""Rows that a thread takes at a time."""

_exp8, _exp1 = exp_of(8), exp_of(1)


@inlined
def _normalise(x, weight, out, width, eps):
    """`x / sqrt(mean(x ** 2) + eps) * weight`; `out` may be `x`."""
    lanes, rest = splat(0.0, 16), splat(0.0, 1)
    at = 0
    while at + 16 <= width:
        part = load(x + at * F32, 16)
        lanes = fma(part, part, lanes)
        at += 16
    while at < width:
        one = load(x + at * F32, 1)
        rest = fma(one, one, rest)
        at += 1
    mean = div(splat(sum_lanes(lanes) + sum_lanes(rest), 1), splat(width, 1))
    factor = sum_lanes(div(splat(1.0, 1), root(add(mean, splat(eps, 1)))))
    at = 0
    while at + 8 <= width:
        store(out + at * F32, mul(mul(load(x + at * F32, 8), splat(factor, 8)), load(weight + at * F32, 8)))
        at += 8
    while at < width:
        store(out + at * F32, mul(mul(load(x + at * F32, 1), splat(factor, 1)), load(weight + at * F32, 1)))
        at += 1


@inlined
def _add(x, other, count):
    at = 0
    while at + 8 <= count:
        store(x + at * F32, add(load(x + at * F32, 8), load(other + at * F32, 8)))
        at += 8
    while at < count:
        store(x + at * F32, add(load(x + at * F32, 1), load(other + at * F32, 1)))
        at += 1


def add_rms_norm(args):
    """`x += other` where there is one, then `out = rms_norm(x)`. For the arguments see `kernels/cpu/elementwise.py`."""
    x, other, weight, out = load_int(args + 16), load_int(args + 24), load_int(args + 32), load_int(args + 40)
    rows, width, eps = load_int(args + 48), load_int(args + 56), load_float(args + 64)
    first = take_next(args) * ROWS
    while first < rows:
        for row in range(first, min(first + ROWS, rows)):
            offset = row * width * F32
            if other != 0:
                _add(x + offset, other + offset, width)
            _normalise(x + offset, weight, out + offset, width, eps)
        first = take_next(args) * ROWS


def silu_and_mul(args):
    """`out = gate / (1 + exp(-gate)) * up` for rows of gates, then ups."""
    gate_up, out, rows, width = load_int(args + 16), load_int(args + 24), load_int(args + 32), load_int(args + 40)
    first = take_next(args) * ROWS
    while first < rows:
        for row in range(first, min(first + ROWS, rows)):
            gate, target = gate_up + row * 2 * width * F32, out + row * width * F32
            up = gate + width * F32
            at = 0
            while at + 8 <= width:
                g = load(gate + at * F32, 8)
                below = add(_exp8(sub(splat(0.0, 8), g)), splat(1.0, 8))
                store(target + at * F32, mul(div(g, below), load(up + at * F32, 8)))
                at += 8
            while at < width:
                h = load(gate + at * F32, 1)
                under = add(_exp1(sub(splat(0.0, 1), h)), splat(1.0, 1))
                store(target + at * F32, mul(div(h, under), load(up + at * F32, 1)))
                at += 1
        first = take_next(args) * ROWS


@inlined
def _rotate(x, angles, half):
    """Pairs `(x[i], x[half + i])`; `angles` holds cosines, then sines. Products and sums round one by one."""
    size = half * F32
    at = 0
    while at + 8 <= half:
        here = at * F32
        cos, sin = load(angles + here, 8), load(angles + size + here, 8)
        a, b = load(x + here, 8), load(x + size + here, 8)
        store(x + here, sub(mul(a, cos), mul(b, sin)))
        store(x + size + here, add(mul(b, cos), mul(a, sin)))
        at += 8
    while at < half:
        here = at * F32
        cos1, sin1 = load(angles + here, 1), load(angles + size + here, 1)
        a1, b1 = load(x + here, 1), load(x + size + here, 1)
        store(x + here, sub(mul(a1, cos1), mul(b1, sin1)))
        store(x + size + here, add(mul(b1, cos1), mul(a1, sin1)))
        at += 1


def rotary_and_write_kv(args):
    """Rotates queries and keys in place; puts keys and values into the pool."""
    rows = load_int(args + 104)
    first = take_next(args) * ROWS
    while first < rows:
        for row in range(first, min(first + ROWS, rows)):
            _write_row(args, row)
        first = take_next(args) * ROWS


@inlined
def _write_row(args, row):
    num_heads, num_kv_heads, head_dim = load_int(args + 64), load_int(args + 72), load_int(args + 80)
    block_size, block_bytes = load_int(args + 88), load_int(args + 96)
    q_norm, k_norm, eps, kind = load_int(args + 48), load_int(args + 56), load_float(args + 112), load_int(args + 120)
    head_bytes, slot_bytes = head_dim * F32, head_dim * size_of(kind)
    x = load_int(args + 16) + row * (num_heads + 2 * num_kv_heads) * head_bytes
    angles = load_int(args + 24) + row * head_bytes
    for head in range(num_heads + num_kv_heads):
        norm = q_norm if head < num_heads else k_norm
        at = x + head * head_bytes
        if norm != 0:
            _normalise(at, norm, at, head_dim, eps)
        _rotate(at, angles, head_dim // 2)
    slot = load_int(load_int(args + 32) + row * 8)
    target = load_int(args + 40) + slot // block_size * block_bytes + slot % block_size * slot_bytes
    x += num_heads * head_bytes
    for head in range(2 * num_kv_heads):  # of keys, then of values: so they lie in both places
        put(x + head * head_bytes, target + head * block_size * slot_bytes, head_dim, kind)
