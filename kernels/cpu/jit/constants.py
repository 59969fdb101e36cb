"""What the compiled kernels and their callers must agree on. Imports nothing: neither numba nor torch."""

KV_TILE = 64
"""Keys per attention tile, from position 0 on: it fixes the order of sums."""

COLUMNS = 64
"""Outputs of a dense layer whose weights lie together: [ceil(out / COLUMNS), width, COLUMNS]."""

WEIGHT_TILE = 64
"""Weights of so many inner positions stay in the first-level cache while all rows use them."""

INT8, BFLOAT16, FLOAT16, FLOAT32, OFFSET_INT8 = 0, 1, 2, 3, 4
"""How numbers are kept: weights of a narrow dense layer in all ways but FLOAT32, keys and values as floats."""

BUCKETS = 2048
"""Of the histogram by which the sampler's filters select: float64 each."""
