"""Which tokens min-p, top-k and top-p leave, without sorting them."""

from __future__ import annotations

import numpy as np

from kvferry.kernels.cpu.jit.constants import BUCKETS
from kvferry.kernels.cpu.jit.memory import (
    F32,
    load_bits,
    load_double,
    load_float,
    load_int,
    store_double,
    store_float,
    store_int,
    take_next,
)
from kvferry.kernels.cpu.jit.simd import inlined

LEVELS = 11, 10, 10
"""Bits of a probability that each pass of `_cut` tells apart, from the highest on; the sign is 0."""

assert 2 ** max(LEVELS) == BUCKETS


def filter_tokens(args):
    """See `kernels/cpu/sampling.py` for the arguments. One item of work is a row."""
    rows, width = load_int(args + 32), load_int(args + 40)
    histogram = load_int(args + 72) + take_next(args + 8) * (BUCKETS * 8 + (width + 1) // 2 * 8)
    row = take_next(args)
    while row < rows:
        offset = row * width * F32
        top_k, top_p = load_int(load_int(args + 48) + row * 8), load_double(load_int(args + 56) + row * 8)
        min_p = load_float(load_int(args + 64) + row * F32)
        _filter_row(load_int(args + 16) + offset, load_int(args + 24) + offset, width, top_k, top_p, min_p, histogram)
        row = take_next(args)


@inlined
def _filter_row(probs, out, width, top_k, top_p, min_p, histogram):
    top = load_float(probs)
    for i in range(width):
        top = max(top, load_float(probs + i * F32))
    floor = top * min_p
    if 0 < top_k < width:
        floor = max(floor, _cut(probs, width, floor, float(top_k), False, histogram))
    if top_p < 1.0:
        total = _mass(probs, width, floor)
        # All that is less than this is together less than what top-p may leave out.
        lowest = max(floor, np.float32((1.0 - top_p) * 0.5 * total / width))
        floor = max(floor, _cut(probs, width, lowest, top_p * total, True, histogram))
    for i in range(width):
        p = load_float(probs + i * F32)
        store_float(out + i * F32, p if p >= floor else np.float32(0.0))


@inlined
def _mass(probs, width, floor):
    """Of those that are not below `floor`, in four chains."""
    a = b = c = d = 0.0
    i = 0
    while i + 4 <= width:
        a += _from(load_float(probs), floor)
        b += _from(load_float(probs + F32), floor)
        c += _from(load_float(probs + 2 * F32), floor)
        d += _from(load_float(probs + 3 * F32), floor)
        probs += 4 * F32
        i += 4
    while i < width:
        a += _from(load_float(probs), floor)
        probs += F32
        i += 1
    return (a + b) + (c + d)


@inlined
def _from(p, floor):
    return p if p >= floor else np.float32(0.0)


@inlined
def _cut(probs, width, lowest, goal, by_mass, histogram):
    """The largest number such that those from it on reach `goal` together, in mass or in number; at least the smallest.

    Radix selection over the bits, which grow with the numbers. Those below `lowest` are left out.
    """
    numbers, count = histogram + BUCKETS * 8, 0
    for i in range(width):  # without a branch, which nothing could foresee
        p = load_float(probs + i * F32)
        store_float(numbers + count * F32, p)
        count += p >= lowest
    shift, prefix, above = 31, 0, 0.0
    for bits in LEVELS:
        shift -= bits
        for i in range(2**bits):
            store_double(histogram + i * 8, 0.0)
        for i in range(count):
            number = load_bits(numbers + i * F32)
            if number >> (shift + bits) == prefix:
                bucket = histogram + (number >> shift & (2**bits - 1)) * 8
                store_double(bucket, load_double(bucket) + (load_float(numbers + i * F32) if by_mass else 1.0))
        found, at = 0, 2**bits - 1
        while at >= 0:
            weight = load_double(histogram + at * 8)
            if weight > 0.0:
                found = at
                if above + weight >= goal:
                    break
                above += weight
            at -= 1
        if at < 0:  # rounding has put the goal out of reach: the smallest
            above -= load_double(histogram + found * 8)
        prefix = prefix << bits | found
    store_int(histogram, prefix)
    return load_float(histogram)
