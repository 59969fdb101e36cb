"""The public entry of every op: its contract, its checks, and which kernel serves the device.

Promise of all of them on CPU in float32: a row of the result has the same bits whatever other rows are in the call,
whichever row it is, and with any number of threads. Knows nothing of the rest of kvferry.

The pool of KV blocks is `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, contiguous; index 0 of the
third dimension holds keys, 1 holds values. Slots that were never written may hold anything, NaN included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvferry.kernels import reference
from kvferry.kernels.cpu import attention as cpu_attention
from kvferry.kernels.cpu import elementwise as cpu_elementwise
from kvferry.kernels.cpu import numerics as cpu_numerics
from kvferry.kernels.cpu.dense import PackedLinear


def numerics_id(device: torch.device, dtype: torch.dtype) -> str:
    """Names the bits that these ops compute here: nodes with the same id and model compute the same bits.

    Equal in every process on one machine, whatever the number of threads. On other devices than the CPU it names the
    device and torch only: no kernel there is batch-invariant yet.
    """
    if device.type == "cpu":
        return cpu_numerics.numerics_id(dtype)
    name = torch.cuda.get_device_name(device).replace(" ", "_") if device.type == "cuda" else device.type
    return f"{name}-{str(dtype).removeprefix('torch.')}-torch{torch.__version__}"


def _is_compiled(x: torch.Tensor) -> bool:
    """Whether `kernels/cpu` serves tensors like `x`; the reference serves the others."""
    return x.device.type == "cpu" and x.dtype == torch.float32


def is_batch_invariant(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the promise above is in force: a row's bits depend on that row alone."""
    return device.type == "cpu" and dtype is torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x` [..., width], `weight` [width] -> like `x`."""
    if x.shape[-1:] != weight.shape:
        raise ValueError(f"x {tuple(x.shape)} does not fit a weight {tuple(weight.shape)}")
    if _is_compiled(x):
        _check_memory(torch.float32, weight)
        return cpu_elementwise.add_rms_norm(x.contiguous(), None, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `other` to `x` [num_tokens, width] in place -> the rms_norm of the sum. Both are contiguous."""
    if x.shape != other.shape or x.shape[-1:] != weight.shape:
        raise ValueError(f"x {tuple(x.shape)}, other {tuple(other.shape)} and weight {tuple(weight.shape)} do not fit")
    if _is_compiled(x):
        _check_memory(torch.float32, x, other, weight)
        return cpu_elementwise.add_rms_norm(x, other, weight, eps)
    return reference.rms_norm(x.add_(other), weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate_up` [num_tokens, 2 * width], gates first -> [num_tokens, width]."""
    if _is_compiled(gate_up):
        return cpu_elementwise.silu_and_mul(gate_up.contiguous())
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
    twice or lie outside the pool. -> [num_tokens, num_heads, head_dim], a view of `qkv` or not.
    """
    num_kv_heads, head_dim = kv_cache.shape[3], kv_cache.shape[5]
    num_tokens, num_heads = len(qkv), qkv.shape[1] // head_dim - 2 * num_kv_heads
    if num_heads < 1 or qkv.shape[1] % head_dim or head_dim % 2:
        raise ValueError(f"qkv {tuple(qkv.shape)} does not fit a pool {tuple(kv_cache.shape)}")
    if len(slot_mapping) != num_tokens or cos_sin.shape != (num_tokens, head_dim):
        raise ValueError(f"{num_tokens} tokens, {len(slot_mapping)} slots, cosines and sines {tuple(cos_sin.shape)}")
    if _is_compiled(qkv) and _is_compiled(kv_cache):
        _check_memory(torch.float32, qkv, cos_sin, kv_cache, q_norm, k_norm)
        _check_memory(torch.int64, slot_mapping)
        return cpu_elementwise.rotary_and_write_kv(qkv, cos_sin, kv_cache, layer, slot_mapping, q_norm, k_norm, eps)
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
    """`x @ weight.T + bias` by torch's own kernel, on devices where we have no other."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


Linear = PackedLinear | TorchLinear


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """A dense layer that maps [num_tokens, width] to [num_tokens, out]; `weight` is [out, width], `bias` [out].

    The arguments are not kept on CPU, where weights are repacked: the caller may free them.
    """
    return PackedLinear(weight, bias) if weight.device.type == "cpu" else TorchLinear(weight, bias)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which keys each query row of one step sees. Made once per step, used by every layer."""

    block_tables: torch.Tensor  # [num_seqs, max_num_blocks] int64
    query_starts: tuple[int, ...]  # num_seqs + 1
    context_lens: tuple[int, ...]  # num_seqs
    cpu: cpu_attention.AttentionPlan | None


def plan_attention(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, query_starts: Sequence[int], context_lens: Sequence[int]
) -> AttentionPlan:
    """Sequence i owns query rows `[query_starts[i], query_starts[i + 1])`, at positions from `context_lens[i]` on.

    Row j of a sequence sees its positions `[0, context_lens[i] + j]`, found through `block_tables[i]`.
    """
    num_seqs = len(context_lens)
    if len(query_starts) != num_seqs + 1 or len(block_tables) != num_seqs:
        raise ValueError(f"{num_seqs} context lengths, {len(query_starts)} starts, {len(block_tables)} block tables")
    if block_tables.dtype != torch.int64:
        raise ValueError(f"block tables are {block_tables.dtype}, not int64")
    num_slots = block_tables.shape[1] * kv_cache.shape[4]
    for i, context_len in enumerate(context_lens):
        if context_len + query_starts[i + 1] - query_starts[i] > num_slots:
            raise ValueError(f"sequence {i} ends past the {num_slots} positions of its block table")
    cpu = cpu_attention.plan_attention(block_tables, query_starts, context_lens) if _is_compiled(kv_cache) else None
    return AttentionPlan(block_tables, tuple(query_starts), tuple(context_lens), cpu)


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
        if query.dtype != torch.float32 or query.stride()[1:] != (query.shape[2], 1):
            query = query.float().contiguous()
        _check_memory(torch.float32, kv_cache)
        return cpu_attention.paged_attention(query, kv_cache, layer, plan.cpu, scale)
    return reference.paged_attention(
        query, kv_cache, layer, plan.block_tables, plan.query_starts, plan.context_lens, scale
    )


def filter_tokens(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """`probs` [n, vocab] with the tokens set to 0 that min-p, then top-k, then top-p leave out; not renormalised.

    `top_k` [n] int64 (0: off), `top_p` and `min_p` [n] (1 and 0: off). The most likely token always stays.
    """
    return reference.filter_tokens(probs, top_k, top_p, min_p)


def draw_tokens(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token per row of `probs` [n, vocab] (any positive sum), by `uniform` [n] float64 in [0, 1) -> [n] int64."""
    return reference.draw_tokens(probs, uniform)
