"""The specification of every op, in plain torch: short, obvious, slow where it must be.

A faster kernel lies beside this file and is tested against it. It serves devices and dtypes that have no kernel yet.
Knows nothing of requests, blocks' owners or models: tensors in, tensors out.

A row's bits must depend on that row alone, never on its neighbours, its index or the number of threads. Of torch's
CPU ops only some keep that: `exp`, `softmax`, `log_softmax`, `rms_norm`, a sum over a short fixed width, and `bmm`
where rows and columns are whole vectors (`QUERY_ROWS`, `HEAD_MULTIPLE`, `KV_TILE`). `F.silu`, `sigmoid`, `F.linear`,
SDPA and sums over a vocabulary do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

KV_TILE = 64
"""Keys per attention tile. Every query walks its keys in these tiles from position 0: it fixes the order of sums."""

QUERY_ROWS = 48
"""Query rows of a `bmm` are padded to a multiple of this; with 1, 2 or 3 rows MKL takes a path with other bits."""

HEAD_MULTIPLE = 16
"""Heads are padded to a multiple of this; in the tail of an odd width MKL's bits depend on the row's index."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`; spelled out, because `F.silu` has other bits in the tail of a buffer."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = torch.neg(gate).exp_().add_(1)
    return torch.div(gate, out, out=out).mul_(up).to(gate_up.dtype)


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the two halves of each head (the "neox" pairing of the Llama family)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def write_kv(
    kv_cache: torch.Tensor, layer: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Rounds to the pool's dtype: to the nearest, of two to the even one. A negative slot is written nowhere."""
    block_size, written = kv_cache.shape[4], slot_mapping >= 0
    key, value, slot_mapping = key[written], value[written], slot_mapping[written]
    blocks, slots = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[blocks, layer, 0, :, slots] = key.to(kv_cache.dtype)
    kv_cache[blocks, layer, 1, :, slots] = value.to(kv_cache.dtype)


def rotary_and_write_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    num_kv_heads, head_dim = kv_cache.shape[3], kv_cache.shape[5]
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = torch.split(heads, [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        query = rms_norm(query, q_norm, eps)
    if k_norm is not None:
        key = rms_norm(key, k_norm, eps)
    cos, sin = cos_sin.chunk(2, dim=-1)
    write_kv(kv_cache, layer, rotary_embedding(key, cos, sin), value, slot_mapping)
    return rotary_embedding(query, cos, sin)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """One sequence after the other, one tile of keys after the other."""
    out = torch.empty_like(query)
    for i, context_len in enumerate(context_lens):
        rows = slice(query_starts[i], query_starts[i + 1])
        num_keys = context_len + rows.stop - rows.start
        # [num_blocks, 2, num_kv_heads, block_size, head_dim] -> [2, num_kv_heads, positions, head_dim]
        blocks = kv_cache[block_tables[i], layer].transpose(0, 2).transpose(0, 1).flatten(2, 3).float()
        key, value = padded(blocks[:, :, :num_keys], KV_TILE, HEAD_MULTIPLE).unbind()
        out[rows] = _attend(query[rows].float(), key, value, context_len, scale).to(query.dtype)
    return out


def padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The last two dimensions filled up with zeros to multiples; `x` itself where they are."""
    if x.shape[-1] % columns == 0 and x.shape[-2] % rows == 0:
        return x
    return F.pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context_len: int, scale: float
) -> torch.Tensor:
    """`query` [n, num_heads, head_dim] at positions from `context_len` on; `key` and `value` are whole tiles.

    The maximum over all keys is exact in any order; sums of weights and of weighted values are taken inside each tile
    and then added tile by tile, so that a tile without a visible key adds zero.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, width = key.shape[:2]
    rows = (query * scale).view(num_tokens, num_kv_heads, -1, head_dim).transpose(0, 1).flatten(1, 2)
    num_rows = rows.shape[1]
    rows = padded(rows, QUERY_ROWS, HEAD_MULTIPLE)
    position = context_len + torch.arange(rows.shape[1], device=query.device) // (num_heads // num_kv_heads)
    hidden = torch.arange(width, device=query.device) > position[:, None]
    scores = torch.bmm(rows, key.transpose(1, 2)).masked_fill_(hidden, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total, out = torch.zeros_like(weights[..., :1]), torch.zeros_like(rows)
    for start in range(0, width, KV_TILE):
        tile = weights[..., start : start + KV_TILE].contiguous()
        total += tile.sum(-1, keepdim=True)
        out += torch.bmm(tile, value[:, start : start + KV_TILE])
    out = (out / total)[:, :num_rows, :head_dim].view(num_kv_heads, num_tokens, -1, head_dim)
    return out.transpose(0, 1).reshape(num_tokens, num_heads, head_dim)


def filter_tokens(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    ordered = _falling(probs)
    width = probs.shape[-1]
    floor = torch.where(top_k[:, None] > 0, ordered.gather(1, top_k.clamp(1, width)[:, None] - 1), 0)
    floor = torch.maximum(floor, ordered[:, :1] * min_p[:, None])
    # The first token at which the mass reaches top_p of what min-p and top-k left is the last one kept.
    mass = torch.where(ordered >= floor, ordered, 0).double().cumsum(-1)
    short = (mass < mass[:, -1:] * top_p[:, None]).sum(-1, keepdim=True).clamp(max=width - 1)
    floor = torch.where(top_p[:, None] < 1, torch.maximum(floor, ordered.gather(1, short)), floor)
    return torch.where(probs >= floor, probs, 0)


def _falling(x: torch.Tensor) -> torch.Tensor:
    """Rows sorted from large to small. numpy sorts values alone, some 20 times faster than torch on a CPU."""
    if x.device.type == "cpu":
        return torch.from_numpy(np.sort(x.numpy(), axis=-1)).flip(-1)
    return x.sort(-1, descending=True).values


def draw_tokens(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse distribution function in token order; a token of probability 0 is never drawn."""
    mass = probs.double().cumsum(-1)
    total = mass[:, -1:]
    goal = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, goal, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)


def gather_blocks(kv_cache: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    return kv_cache[block_ids]


def scatter_blocks(blocks: torch.Tensor, kv_cache: torch.Tensor, block_ids: torch.Tensor) -> None:
    kv_cache[block_ids] = blocks


def copy_blocks(kv_cache: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None:
    for source, target in zip(sources, targets, strict=True):
        kv_cache[target] = kv_cache[source]
