"""The name of the bits that the GPU kernels compute: whatever changes an order of sums must change it."""

from __future__ import annotations

import torch
import triton

from kvferry.kernels.triton import attention, dense


def numerics_id(dtype: torch.dtype, batch_invariant: bool, kv_dtype: torch.dtype) -> str:
    """Without `batch_invariant` dense layers are torch's, and their bits depend on the number of rows."""
    tile = attention.TILES[kv_dtype.itemsize]
    name = f"triton{triton.__version__}-attention{tile.rows}x{tile.keys}x{attention.SPLIT_KEYS}"
    if not batch_invariant:
        return name
    matmul = dense.TILES[dtype.itemsize]
    return f"{name}-matmul{matmul.rows}x{matmul.columns}x{matmul.depth}x{dense.CHUNK}"
