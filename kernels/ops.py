"""The public entry of every op: its contract, its checks, and which kernel serves the device.

Promise of all of them on CPU in float32: a row of the result has the same bits whatever other rows are in the call,
whichever row it is, and with any number of threads. On a GPU the kernels of `kernels/triton` promise it in every dtype;
dense layers only if packed so. Triton is imported when first needed. Knows nothing of the rest of kvferry.

The pool of KV blocks is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous; index 0 of the
third dimension holds keys, 1 holds values. Slots that were never written may hold anything, NaN included. On CPU it may
be of 16 bits: what is written is rounded, what is read is exact, and all computing is as over a float32 pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from kvferry.kernels import reference
from kvferry.kernels.cpu import attention as cpu_attention
from kvferry.kernels.cpu import elementwise as cpu_elementwise
from kvferry.kernels.cpu import numerics as cpu_numerics
from kvferry.kernels.cpu import sampling as cpu_sampling
from kvferry.kernels.cpu.dense import PackedLinear
from kvferry.kernels.cpu.narrow import NarrowLinear, narrowed, narrowed_exactly
from kvferry.kernels.cpu.narrow import WeightFormat as WeightFormat
from kvferry.kernels.cpu.replay import Recording as Recording
from kvferry.kernels.cpu.replay import record as record

if TYPE_CHECKING:
    from kvferry.kernels.triton import attention as gpu_attention_types

_HAS_TRITON = find_spec("triton") is not None


def numerics_id(
    device: torch.device,
    dtype: torch.dtype,
    batch_invariant: bool = False,
    weight_format: WeightFormat = "float32",
    kv_dtype: torch.dtype | None = None,
) -> str:
    """Names the bits that these ops compute here: nodes with the same id and model compute the same bits.

    Equal in every process on one machine, whatever the number of threads. `batch_invariant` and `weight_format`: as
    layers are packed; `kv_dtype`: the pool's, by default `dtype`.
    """
    if device.type == "cpu":
        return cpu_numerics.numerics_id(dtype, weight_format, kv_dtype or dtype)
    name = torch.cuda.get_device_name(device).replace(" ", "_") if device.type == "cuda" else device.type
    found = f"{name}-{str(dtype).removeprefix('torch.')}-torch{torch.__version__}"
    if not _is_on_gpu(device, dtype):
        return found
    from kvferry.kernels.triton import numerics as gpu_numerics

    return f"{found}-{gpu_numerics.numerics_id(dtype, batch_invariant, kv_dtype or dtype)}"


def _is_compiled(x: torch.Tensor) -> bool:
    """Whether `kernels/cpu` serves tensors like `x`."""
    return x.device.type == "cpu" and x.dtype == torch.float32


def _is_compiled_pool(kv_cache: torch.Tensor) -> bool:
    """Whether `kernels/cpu` serves this pool."""
    return kv_cache.device.type == "cpu" and kv_cache.dtype in cpu_elementwise.KV_KINDS


def _is_gpu(x: torch.Tensor) -> bool:
    """Whether `kernels/triton` serves tensors like `x`; the reference serves what no kernel does."""
    return _is_on_gpu(x.device, x.dtype)


def _is_on_gpu(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.float32, torch.float16, torch.bfloat16) and _HAS_TRITON


def is_batch_invariant(device: torch.device, dtype: torch.dtype, wanted: bool = False) -> bool:
    """Whether the promise above is in force: a row's bits depend on that row alone. `wanted`: as layers are packed."""
    return (device.type == "cpu" and dtype is torch.float32) or (wanted and _is_on_gpu(device, dtype))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., width], `weight` [width] -> like `x`."""
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {tuple(weight.shape)}")
    if _is_compiled(x):
        _check_memory(torch.float32, weight)
        return cpu_elementwise.add_rms_norm(x.contiguous(), None, weight, eps)
    if _is_gpu(x):
        from kvferry.kernels.triton import elementwise as gpu_elementwise

        _check_memory(x.dtype, weight)
        return gpu_elementwise.add_rms_norm(x.contiguous(), None, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `other` to `x` [num_tokens, width] in place -> the rms_norm of the sum. Both are contiguous."""
    if x.shape != other.shape or x.shape[-1:] != weight.shape:
        raise ValueError(f"x {tuple(x.shape)}, other {tuple(other.shape)} and weight {tuple(weight.shape)} do not fit")
    if _is_compiled(x):
        _check_memory(torch.float32, x, other, weight)
        return cpu_elementwise.add_rms_norm(x, other, weight, eps)
    if _is_gpu(x):
        from kvferry.kernels.triton import elementwise as gpu_elementwise

        _check_memory(x.dtype, x, other, weight)
        return gpu_elementwise.add_rms_norm(x, other, weight, eps)
    return reference.rms_norm(x.add_(other), weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [num_tokens, 2 * width], gates first -> [num_tokens, width]."""
    if _is_compiled(gate_up):
        return cpu_elementwise.silu_and_mul(gate_up.contiguous())
    if _is_gpu(gate_up):
        from kvferry.kernels.triton import elementwise as gpu_elementwise

        return gpu_elementwise.silu_and_mul(gate_up.contiguous())
    return reference.silu_and_mul(gate_up)


def rotary_and_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """From a layer's fused projection to the queries, with its keys and values put into the pool, in place.

    `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] is overwritten. Queries and keys are normalised first
    where `q_norm` and `k_norm` [head_dim] are given, then rotated: `cos_sin` [num_tokens, head_dim] float32 holds each
    token's cosines, then its sines. `slot_mapping` [num_tokens] int64 is block * block_size + slot; no slot may occur
    twice or lie outside the pool; on a GPU a token whose slot is -1 is written nowhere.
    -> [num_tokens, num_heads, head_dim], a view of `qkv` or not.
    """
    num_kv_heads, head_dim = kv_cache.shape[3], kv_cache.shape[5]
    num_tokens, num_heads = len(qkv), qkv.shape[1] // head_dim - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] % head_dim or head_dim % 2:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit a pool {tuple(kv_cache.shape)}")
    if len(slot_mapping) != num_tokens or cos_sin.shape != (num_tokens, head_dim):
        raise ValueError(f"{num_tokens} tokens, {len(slot_mapping)} slots, cosines and sines {tuple(cos_sin.shape)}")
    if _is_compiled(qkv) and _is_compiled_pool(kv_cache):
        _check_memory(torch.float32, qkv, cos_sin, q_norm, k_norm)
        _check_memory(kv_cache.dtype, kv_cache)
        _check_memory(torch.int64, slot_mapping)
        return cpu_elementwise.rotary_and_write_kv(qkv, cos_sin, kv_cache, layer, slot_mapping, q_norm, k_norm, eps)
    if _is_gpu(qkv) and _is_gpu(kv_cache):
        from kvferry.kernels.triton import elementwise as gpu_elementwise

        _check_memory(qkv.dtype, qkv, q_norm, k_norm)
        _check_memory(kv_cache.dtype, kv_cache)
        _check_memory(torch.float32, cos_sin)
        _check_memory(torch.int64, slot_mapping)
        return gpu_elementwise.rotary_and_write_kv(qkv, cos_sin, kv_cache, layer, slot_mapping, q_norm, k_norm, eps)
    return reference.rotary_and_write_kv(qkv, cos_sin, kv_cache, layer, slot_mapping, q_norm, k_norm, eps)


def _check_memory(dtype: torch.dtype, *tensors: torch.Tensor | None) -> None:
    """A compiled kernel sees addresses only: what lies there must be what it expects."""
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous()):
            raise ValueError(
                f"a tensor {tuple(tensor.shape)} of {tensor.dtype} with strides {tensor.stride()} "
                f"must be contiguous and of {dtype}"
            )


class TorchLinear:
    """`x @ weight.T + bias` by torch's own kernel."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


Linear = Callable[[torch.Tensor], torch.Tensor]


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    batch_invariant: bool = False,
    weight_format: WeightFormat = "float32",
) -> Linear:
    """A dense layer that maps [num_tokens, width] to [num_tokens, out]; `weight` is [out, width], `bias` [out].

    `batch_invariant` chooses on a GPU between our kernel and torch's, `weight_format` on a CPU how weights are kept:
    narrower ones are rounded now, and multiplied in float32; float32 ones are kept narrower where that loses nothing.
    Elsewhere they stay in the dtype that they come in. The arguments are not kept on CPU, where weights are repacked:
    the caller may free them.
    """
    is_cpu = weight.device.type == "cpu"
    if is_cpu and weight_format != "float32":
        return NarrowLinear(narrowed(weight, weight_format), bias)
    if weight_format not in ("float32", str(weight.dtype).removeprefix("torch.")):
        raise ValueError(f"{weight.dtype} weights become {weight_format} on a CPU only, not on {weight.device.type}")
    if batch_invariant and _is_gpu(weight):
        from kvferry.kernels.triton.dense import InvariantLinear

        return InvariantLinear(weight, bias)
    if not is_cpu:
        return TorchLinear(weight, bias)
    narrow = narrowed_exactly(weight)
    return PackedLinear(weight, bias) if narrow is None else NarrowLinear(narrow, bias)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which keys each query row of one step sees. Made once per step, used by every layer."""

    block_tables: torch.Tensor  # [num_seqs, max_num_blocks] int64
    query_starts: tuple[int, ...]  # num_seqs + 1; both are empty where only the device knows
    context_lens: tuple[int, ...]  # num_seqs
    cpu: cpu_attention.AttentionPlan | None
    gpu: gpu_attention_types.AttentionPlan | None


def plan_attention(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    num_heads: int | None = None,
) -> AttentionPlan:
    """Sequence i owns query rows `[query_starts[i], query_starts[i + 1])`, at positions from `context_lens[i]` on.

    Row j of a sequence sees its positions `[0, context_lens[i] + j]`, found through `block_tables[i]`. Without
    `num_heads` of the queries no kernel for GPUs is planned, and the reference serves.
    """
    num_seqs = len(context_lens)
    if len(query_starts) != num_seqs + 1 or len(block_tables) != num_seqs:
        raise ValueError(f"{num_seqs} context lengths, {len(query_starts)} starts, {len(block_tables)} block tables")
    if block_tables.dtype != torch.int64:
        raise ValueError(f"block tables are {block_tables.dtype}, not int64")
    num_slots = block_tables.shape[1] * kv_cache.shape[4]
    ends = np.asarray(context_lens, dtype=np.int64) + np.diff(np.asarray(query_starts, dtype=np.int64))
    if ends.max(initial=0) > num_slots:
        raise ValueError(f"sequence {ends.argmax()} ends past the {num_slots} positions of its block table")
    cpu = gpu = None
    if _is_compiled_pool(kv_cache):
        cpu = cpu_attention.plan_attention(block_tables, query_starts, context_lens)
    if num_heads is not None and _is_gpu(kv_cache):
        from kvferry.kernels.triton import attention as gpu_attention

        gpu = gpu_attention.plan_attention(kv_cache, block_tables, query_starts, context_lens, num_heads)
    return AttentionPlan(block_tables, tuple(query_starts), tuple(context_lens), cpu, gpu)


def can_capture(kv_cache: torch.Tensor) -> bool:
    """Whether decodes over this pool run by kernels alone, so that they may be captured as a CUDA graph."""
    return _is_gpu(kv_cache)


def plan_decodes(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, num_heads: int
) -> AttentionPlan:
    """Like `plan_attention` of sequences with one query row each, for pools that `can_capture` accepts.

    `context_lens` [num_seqs] lies on the device and is not looked at, so that the plan may be made inside of a CUDA
    graph: launches depend on shapes alone. The same bits for each row; columns of `block_tables` cost scratch memory.
    """
    from kvferry.kernels.triton import attention as gpu_attention

    if block_tables.dtype != torch.int64 or block_tables.shape[:1] != context_lens.shape:
        raise ValueError(
            f"block tables {tuple(block_tables.shape)} of {block_tables.dtype}, {len(context_lens)} lengths"
        )
    gpu = gpu_attention.plan_decodes(kv_cache, block_tables, context_lens, num_heads)
    return AttentionPlan(block_tables, (), (), None, gpu)


def refill_plan(plan: AttentionPlan, other: AttentionPlan) -> None:
    """Makes recorded attention over `plan` see what `other` says, while that lives. CPU, the same numbers of tokens."""
    assert plan.cpu is not None
    assert other.cpu is not None
    assert plan.query_starts == other.query_starts
    plan.cpu.items.copy_(other.cpu.items)


def can_record(x: torch.Tensor) -> bool:
    """Whether ops over tensors like `x` may be recorded."""
    return _is_compiled(x)


def paged_attention(
    query: torch.Tensor, kv_cache: torch.Tensor, layer: int, plan: AttentionPlan, scale: float
) -> torch.Tensor:
    """Causal attention of `query` [num_tokens, num_heads, head_dim] over the pool -> the same shape, contiguous.

    The rows' own keys and values must have been written before. num_heads is a multiple of the pool's num_kv_heads:
    neighbouring query heads share a kv head.
    """
    if query.shape[1] % kv_cache.shape[3] or query.shape[2] != kv_cache.shape[5]:
        raise ValueError(f"query {tuple(query.shape)} does not fit a pool {tuple(kv_cache.shape)}")
    if plan.cpu is not None:
        wide = query.float()
        if wide.stride()[1:] != (query.shape[2], 1):
            wide = wide.contiguous()
        _check_memory(kv_cache.dtype, kv_cache)
        return cpu_attention.paged_attention(wide, kv_cache, layer, plan.cpu, scale).to(query.dtype)
    if plan.gpu is not None:
        from kvferry.kernels.triton import attention as gpu_attention

        if query.stride()[1:] != (query.shape[2], 1):
            query = query.contiguous()
        _check_memory(kv_cache.dtype, kv_cache)
        return gpu_attention.paged_attention(query, kv_cache, layer, plan.gpu, scale)
    return reference.paged_attention(
        query, kv_cache, layer, plan.block_tables, plan.query_starts, plan.context_lens, scale
    )


def filter_tokens(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`probs` [n, vocab] with the tokens set to 0 that min-p, then top-k, then top-p leave out; not renormalised.

    `top_k` [n] int64 (0: off), `top_p` and `min_p` [n] (1 and 0: off). The most likely token always stays.
    """
    if _is_gpu(probs) and probs.dtype == torch.float32:
        from kvferry.kernels.triton import sampling as gpu_sampling

        return gpu_sampling.filter_tokens(probs, top_k, top_p, min_p)
    if _is_compiled(probs):
        return cpu_sampling.filter_tokens(probs, top_k, top_p, min_p)
    return reference.filter_tokens(probs, top_k, top_p, min_p)


def draw_tokens(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row of `probs` [n, vocab] (any positive sum), by `uniform` [n] float64 in [0, 1) -> [n] int64."""
    if _is_gpu(probs) and probs.dtype == torch.float32:
        from kvferry.kernels.triton import sampling as gpu_sampling

        return gpu_sampling.draw_tokens(probs, uniform)
    return reference.draw_tokens(probs, uniform)


def gather_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Whole blocks out of the pool: `block_ids` [n] int64 -> [n, ...]."""
    if _is_gpu(kv_cache):
        from kvferry.kernels.triton import elementwise as gpu_elementwise

        _check_memory(torch.int64, block_ids)
        return gpu_elementwise.gather_blocks(kv_cache, block_ids)
    return reference.gather_blocks(kv_cache, block_ids)


def scatter_blocks(blocks: torch.Tensor, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    """`blocks` [n, ...] contiguous into the pool's blocks `block_ids` [n] int64, no two of which are alike."""
    if _is_gpu(kv_cache):
        from kvferry.kernels.triton import elementwise as gpu_elementwise

        _check_memory(kv_cache.dtype, blocks)
        _check_memory(torch.int64, block_ids)
        return gpu_elementwise.scatter_blocks(blocks, kv_cache, block_ids)
    return reference.scatter_blocks(blocks, kv_cache, block_ids)


def copy_blocks(kv_cache: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    """Copies blocks inside the pool one after the other: a target may be the source of a later copy."""
    if sources and _is_gpu(kv_cache) and set(sources).isdisjoint(targets):
        from kvferry.kernels.triton import elementwise as gpu_elementwise

        ids = torch.tensor([sources, targets]).to(kv_cache.device)
        return gpu_elementwise.copy_blocks(kv_cache, ids[0], ids[1])
    return reference.copy_blocks(kv_cache, sources, targets)
