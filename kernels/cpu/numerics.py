"""A short name for the bits that this machine's CPU kernels compute.

The name binds what is known to matter (instruction set, attention tile, torch, compiler), and a digest of what the
kernels really return for fixed input: libraries choose code paths by processor model, caches and environment variables,
and no list of those would be complete.
"""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import torch

from kvferry.kernels import reference
from kvferry.kernels.cpu import attention, elementwise
from kvferry.kernels.cpu.dense import PackedLinear
from kvferry.kernels.cpu.jit.constants import KV_TILE
from kvferry.kernels.cpu.narrow import GROUP, NarrowLinear, WeightFormat, narrowed
from kvferry.kernels.cpu.native import compiler_version


@cache
def numerics_id(dtype: torch.dtype, weight_format: WeightFormat, kv_dtype: torch.dtype) -> str:
    """Equal in every process on one machine, whatever the number of threads."""
    parts = (
        "cpu",
        torch.backends.cpu.get_cpu_capability().lower(),
        str(dtype).removeprefix("torch."),
        *([] if kv_dtype == dtype else [f"kv{str(kv_dtype).removeprefix('torch.')}"]),
        *([] if weight_format == "float32" else [_narrow_name(weight_format)]),
        f"tile{KV_TILE}",
        f"torch{torch.__version__}",
        compiler_version(),
        _probe(dtype, weight_format, kv_dtype),
    )
    return "-".join(parts)


def _narrow_name(weight_format: WeightFormat) -> str:
    return f"w{weight_format}" + (f"g{GROUP}" if weight_format == "int8" else "")


def _fixed(seed: int, *shape: int) -> torch.Tensor:
    """Numbers in [-1, 1) from integer arithmetic alone: the same on every machine."""
    index = np.arange(np.prod(shape), dtype=np.uint64) * np.uint64(2654435761) + np.uint64(seed * 40503)
    return torch.from_numpy(((index >> np.uint64(7)) % np.uint64(65536)).astype(np.float32) / 32768 - 1).view(shape)


@torch.inference_mode()
def _probe(dtype: torch.dtype, weight_format: WeightFormat, kv_dtype: torch.dtype) -> str:
    """A digest of the ops' results on fixed input of odd sizes."""
    x = _fixed(1, 37, 2100).to(dtype)
    query, pool = _fixed(2, 38, 6, 64).to(dtype), _fixed(3, 16, 1, 2, 2, 16, 64).to(kv_dtype)
    tables, starts, context_lens = torch.arange(16).view(2, 8), (0, 37, 38), (60, 100)
    weight = _fixed(4, 128, 2100)
    dense = PackedLinear(weight) if weight_format == "float32" else NarrowLinear(narrowed(weight, weight_format))
    results = [dense(x), torch.log_softmax(x.float() * 5, dim=-1)]
    if dtype == torch.float32:
        plan = attention.plan_attention(tables, starts, context_lens)
        results.append(attention.paged_attention(query, pool, 0, plan, 0.125))
        results.append(elementwise.silu_and_mul(x))
        results.append(elementwise.add_rms_norm(x, None, x[0], 1e-5))
        qkv, cos_sin = x[:, :640].contiguous(), x[:, :64].contiguous()
        results.append(elementwise.rotary_and_write_kv(qkv, cos_sin, pool, 0, torch.arange(37), None, None, 0.0))
        results.append(pool)
    else:
        results.append(reference.paged_attention(query, pool, 0, tables, starts, context_lens, 0.125))
        results.append(reference.silu_and_mul(x))
        results.append(reference.rms_norm(x, x[0], 1e-5))
    digest = hashlib.blake2b(digest_size=4)
    for result in results:
        digest.update(result.float().contiguous().numpy().tobytes())
    return digest.hexdigest()
