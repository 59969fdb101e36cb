"""Which tokens may be drawn, and the draw, without sorting the vocabulary. One program per row of probabilities.

Probabilities are not negative, so their bits as integers are ordered as they are, and the smallest probability that is
kept can be found bit by bit from the top: 31 passes over a row that lies in the cache (a radix selection; compare
"Dual pivot rejection sampling", FlashInfer, Ye et al. 2025). Sums are taken in float64, tile after tile.
"""

import triton
import triton.language as tl


@triton.jit
def _count_and_mass(row_ptr, width, floor, columns: tl.constexpr):
    """Of the row's probabilities that are at least `floor`: how many, and their sum."""
    count = tl.full((columns,), 0, tl.int32)
    mass = tl.full((columns,), 0.0, tl.float64)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        prob = tl.load(row_ptr + column, mask=column < width, other=-1.0)
        is_kept = prob >= floor
        count += is_kept.to(tl.int32)
        mass += tl.where(is_kept, prob, 0.0).to(tl.float64)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def filter_tokens(probs_ptr, top_k_ptr, top_p_ptr, min_p_ptr, out_ptr, width, columns: tl.constexpr):
    """`probs` float32 [n, width] contiguous -> `out` with what min-p, then top-k, then top-p leave out set to 0."""
    row = tl.program_id(0)
    row_ptr = probs_ptr + row.to(tl.int64) * width
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    highest = tl.full((columns,), 0.0, tl.float32)
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        highest = tl.maximum(highest, tl.load(row_ptr + column, mask=column < width, other=0.0))
    floor = tl.max(highest, 0) * min_p
    if top_k > 0:
        bits = top_k.to(tl.int32) * 0
        wanted = tl.minimum(top_k, width)
        for bit in range(31):
            tried = bits | (1 << (30 - bit))
            count, _ = _count_and_mass(row_ptr, width, tried.to(tl.float32, bitcast=True), columns)
            bits = tl.where(count >= wanted, tried, bits)
        floor = tl.maximum(floor, bits.to(tl.float32, bitcast=True))
    if top_p < 1:
        # The largest value such that it and all above it reach the mass: the token at which the sum gets there.
        _, left = _count_and_mass(row_ptr, width, floor, columns)
        goal = left * top_p
        bits = top_k.to(tl.int32) * 0
        for bit in range(31):
            tried = bits | (1 << (30 - bit))
            tried_floor = tried.to(tl.float32, bitcast=True)
            count, mass = _count_and_mass(row_ptr, width, tl.maximum(tried_floor, floor), columns)
            # Where nothing is asked for, something stays all the same.
            bits = tl.where((mass >= goal) & (count > 0), tried, bits)
        floor = tl.maximum(floor, bits.to(tl.float32, bitcast=True))
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        prob = tl.load(row_ptr + column, mask=column < width, other=0.0)
        kept = tl.where(prob >= floor, prob, 0.0)
        tl.store(out_ptr + row.to(tl.int64) * width + column, kept, mask=column < width)


@triton.jit
def draw_tokens(probs_ptr, uniform_ptr, out_ptr, width, columns: tl.constexpr):
    """`probs` float32 [n, width], `uniform` float64 [n] -> int64 [n]: the inverse distribution function."""
    row = tl.program_id(0)
    row_ptr = probs_ptr + row.to(tl.int64) * width
    total = tl.load(uniform_ptr + row) * 0.0
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        total += tl.sum(tl.load(row_ptr + column, mask=column < width, other=0.0).to(tl.float64), 0)
    goal = tl.load(uniform_ptr + row) * total
    found = width + row * 0
    last = row * 0
    before = total * 0.0
    for start in range(0, width, columns):
        column = start + tl.arange(0, columns)
        prob = tl.load(row_ptr + column, mask=column < width, other=0.0).to(tl.float64)
        is_possible = prob > 0
        mass = before + tl.cumsum(prob, 0)
        found = tl.minimum(found, tl.min(tl.where(is_possible & (mass > goal), column, width), 0))
        last = tl.maximum(last, tl.max(tl.where(is_possible, column, 0), 0))
        before += tl.sum(prob, 0)
    # Sums may be rounded so that none exceeds the goal: then it is the last token that can be drawn.
    tl.store(out_ptr + row, tl.where(found < width, found, last).to(tl.int64))
