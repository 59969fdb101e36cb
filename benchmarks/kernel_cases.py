"""What `benchmarks/kernels.py` runs: each kernel on the work of a step, its truth, its floors, and its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from kvferry.kernels import reference
from kvferry.kernels.triton import attention, dense, elementwise, sampling
from kvferry.services.engine.host_mirror import HostMirror

Op = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """By default a layer of Llama 3.1 8B."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    inner: int = 14336
    vocab: int = 128256
    block_size: int = 16
    num_seqs: int = 64  # that decode
    context: int = 4096
    chunk: int = 1024
    num_tokens: int = 2048  # of a step full of prompts
    num_layers: int = 4  # of a whole decode step


@dataclass(frozen=True)
class Case:
    name: str
    op: Op
    truth: Op
    one_row: Op | None = None  # the op on its first row alone: the same bits are expected
    num_bytes: int = 0
    num_operations: int = 0
    peers: dict[str, Op] = field(default_factory=dict)
    written: tuple[torch.Tensor, torch.Tensor] | None = None  # beside the result, by the op and by its truth
    is_exact: bool = False  # whether the truth's very bits are expected


def cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    yield from _attention(sizes, randn)
    yield from _dense(sizes, randn)
    yield from _elementwise(sizes, randn)
    yield from _blocks(sizes, randn)
    yield from _mirror(sizes, randn)
    yield from _sampling(sizes, randn)


Randn = Callable[..., torch.Tensor]


def _attention(sizes: Sizes, randn: Randn) -> Iterator[Case]:
    """Decodes, then one chunk of a prompt behind a cached prefix; blocks in random order."""
    width = -(-sizes.context // sizes.block_size)
    num_blocks = sizes.num_seqs * width
    pool = randn(num_blocks, 1, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    tables = torch.randperm(num_blocks, device=pool.device).view(sizes.num_seqs, width)
    scale, end = sizes.head_dim**-0.5, sizes.context
    for name, num_seqs, num_rows in (("decode", sizes.num_seqs, 1), ("prefill", 1, sizes.chunk)):
        query = randn(num_seqs * num_rows, sizes.num_heads, sizes.head_dim)
        starts, contexts = tuple(range(0, len(query) + 1, num_rows)), (end - num_rows,) * num_seqs
        table = tables[:num_seqs]
        plan = attention.plan_attention(pool, table, starts, contexts, sizes.num_heads)
        alone = attention.plan_attention(pool, table[:1], (0, 1), contexts[:1], sizes.num_heads)
        num_keys = num_seqs * end
        num_pairs = num_seqs * (num_rows * (end - num_rows) + num_rows * (num_rows + 1) // 2)
        yield Case(
            f"{name} attention, {num_seqs} x {num_rows} rows, {end} keys",
            lambda query=query, plan=plan: attention.paged_attention(query, pool, 0, plan, scale),
            lambda query=query, table=table, starts=starts, contexts=contexts: reference.paged_attention(
                query, pool, 0, table, starts, contexts, scale
            ),
            lambda query=query, alone=alone: attention.paged_attention(query[:1], pool, 0, alone, scale),
            2 * query.nbytes + num_keys * 2 * sizes.num_kv_heads * sizes.head_dim * pool.element_size(),
            4 * num_pairs * sizes.num_heads * sizes.head_dim,
            _attention_peers(query, pool, table, num_rows, end),
        )


def _attention_peers(
    query: torch.Tensor, pool: torch.Tensor, table: torch.Tensor, num_rows: int, end: int
) -> dict[str, Op]:
    """The same work over contiguous caches, in paged form where the peer has our layout."""
    num_seqs, (_, num_heads, head_dim) = len(table), query.shape
    blocks = pool[table, 0]  # [num_seqs, width, 2, num_kv_heads, block_size, head_dim]
    key, value = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :end].contiguous().unbind()
    rows = query.view(num_seqs, num_rows, num_heads, head_dim).transpose(1, 2)
    mask = torch.ones(num_rows, end, dtype=torch.bool, device=query.device).tril(end - num_rows)
    if num_rows == 1:
        mask = None
    found: dict[str, Op] = {
        "torch SDPA": lambda: F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, enable_gqa=True)
    }
    if find_spec("flash_attn") and query.dtype != torch.float32:
        from flash_attn import flash_attn_func

        q, k, v = (x.transpose(1, 2).contiguous() for x in (rows, key, value))
        found["flash-attn"] = lambda: flash_attn_func(q, k, v, causal=True)
    if find_spec("flashinfer") and num_rows == 1 and query.dtype != torch.float32:
        import flashinfer

        paged, width = pool[:, 0].contiguous(), table.shape[1]
        workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=query.device)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND")
        indptr = torch.arange(0, table.numel() + 1, width, dtype=torch.int32, device=query.device)
        last = torch.full((num_seqs,), (end - 1) % pool.shape[4] + 1, dtype=torch.int32, device=query.device)
        shape = num_heads, pool.shape[3], head_dim, pool.shape[4]
        wrapper.plan(indptr, table.flatten().int(), last, *shape, q_data_type=query.dtype, kv_data_type=pool.dtype)
        found["FlashInfer"] = lambda: wrapper.run(query, paged)
    return found


def _dense(sizes: Sizes, randn: Randn) -> Iterator[Case]:
    weight = randn(sizes.inner, sizes.hidden) / sizes.hidden**0.5
    for num_rows in (1, sizes.num_seqs, sizes.num_tokens):
        x = randn(num_rows, sizes.hidden)
        yield Case(
            f"matmul, {num_rows} rows, {sizes.hidden} to {sizes.inner}",
            lambda x=x: dense.matmul(x, weight),
            lambda x=x: (x.float() @ weight.float().T).to(x.dtype),
            lambda x=x: dense.matmul(x[:1], weight),
            x.nbytes + weight.nbytes + num_rows * sizes.inner * x.element_size(),
            2 * num_rows * weight.numel(),
            {"torch": lambda x=x: F.linear(x, weight)},
        )


def _elementwise(sizes: Sizes, randn: Randn) -> Iterator[Case]:
    x, weight = randn(sizes.num_tokens, sizes.hidden), randn(sizes.hidden)
    gate_up = randn(sizes.num_tokens, 2 * sizes.inner)
    yield Case(
        f"rms_norm, {sizes.num_tokens} rows",
        lambda: elementwise.add_rms_norm(x, None, weight, 1e-5),
        lambda: reference.rms_norm(x, weight, 1e-5),
        lambda: elementwise.add_rms_norm(x[:1], None, weight, 1e-5),
        2 * x.nbytes,
        peers={"torch": lambda: F.rms_norm(x, weight.shape, weight, 1e-5)},
    )
    yield Case(
        f"silu_and_mul, {sizes.num_tokens} rows",
        lambda: elementwise.silu_and_mul(gate_up),
        lambda: reference.silu_and_mul(gate_up),
        lambda: elementwise.silu_and_mul(gate_up[:1]),
        gate_up.nbytes * 3 // 2,
        peers={"torch": lambda: F.silu(gate_up[:, : sizes.inner]) * gate_up[:, sizes.inner :]},
    )
    heads = sizes.num_heads + 2 * sizes.num_kv_heads
    qkv = randn(sizes.num_tokens, heads * sizes.head_dim)
    angle = randn(sizes.num_tokens, sizes.head_dim // 2).float()
    cos_sin = torch.cat((angle.cos(), angle.sin()), 1)
    num_blocks = -(-sizes.num_tokens // sizes.block_size)
    pool = qkv.new_zeros(num_blocks, 1, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    slots = torch.randperm(num_blocks * sizes.block_size, device=qkv.device)[: sizes.num_tokens]
    true_pool, rest = torch.zeros_like(pool), (0, slots, None, None, 0.0)
    yield Case(
        f"rotary_and_write_kv, {sizes.num_tokens} tokens",
        lambda: elementwise.rotary_and_write_kv(qkv.clone(), cos_sin, pool, *rest),
        lambda: reference.rotary_and_write_kv(qkv.clone(), cos_sin, true_pool, *rest),
        written=(pool, true_pool),
        num_bytes=4 * qkv.nbytes + cos_sin.nbytes,  # with the copy that keeps its input
    )


def _blocks(sizes: Sizes, randn: Randn) -> Iterator[Case]:
    pool = randn(4 * sizes.num_seqs, 16, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    sources = torch.randperm(len(pool), device=pool.device)[: 2 * sizes.num_seqs]
    yield Case(
        f"gather_blocks, {len(sources)} of {pool[0].nbytes / 2**20:.1f} MiB",
        lambda: elementwise.gather_blocks(pool, sources),
        lambda: pool[sources],
        lambda: elementwise.gather_blocks(pool, sources[:1]),
        is_exact=True,
        num_bytes=2 * len(sources) * pool[0].nbytes,
        peers={"torch": lambda: pool[sources]},
    )


def _mirror(sizes: Sizes, randn: Randn) -> Iterator[Case]:
    """What a step of prompts adds to its time where peers read its blocks: a gather, and the way into host memory."""
    pool = randn(sizes.num_tokens // sizes.block_size + 1, 16, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    mirror = HostMirror(pool, host := torch.zeros_like(pool, device="cpu"))
    block_ids = list(range(len(pool) - 1, 0, -1))

    def down() -> torch.Tensor:
        mirror.copy_down(block_ids)
        return host[1:]

    def up() -> torch.Tensor:
        pool[1:] = 0
        mirror.copy_up(block_ids)
        return pool[1:].cpu()

    kept, num_bytes = pool[1:].cpu(), pool[1:].nbytes
    size = f"{num_bytes / 2**20:.0f} MiB"
    yield Case(f"blocks into the host's mirror, {size}", down, lambda: kept, num_bytes=num_bytes, is_exact=True)
    yield Case(f"and out of it, {size}, and read", up, lambda: kept, num_bytes=2 * num_bytes, is_exact=True)


def _sampling(sizes: Sizes, randn: Randn) -> Iterator[Case]:
    probs = torch.softmax(4 * randn(sizes.num_seqs, sizes.vocab).float(), -1)
    ones = torch.ones(len(probs), device=probs.device)
    limits = (50 * ones).long(), 0.9 * ones.double(), 0 * ones
    yield Case(
        f"filter_tokens, {sizes.num_seqs} rows, top-k 50, top-p 0.9",
        lambda: sampling.filter_tokens(probs, *limits),
        lambda: reference.filter_tokens(probs, *limits),
        lambda: sampling.filter_tokens(probs[:1], *(limit[:1] for limit in limits)),
        is_exact=True,
        num_bytes=2 * probs.nbytes,
        peers={"torch, sorting": lambda: reference.filter_tokens(probs, *limits)},
    )
    uniform = torch.rand(len(probs), dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(probs.device)
    yield Case(
        f"draw_tokens, {sizes.num_seqs} rows",
        lambda: sampling.draw_tokens(probs, uniform),
        lambda: reference.draw_tokens(probs, uniform),
        lambda: sampling.draw_tokens(probs[:1], uniform[:1]),
        2 * probs.nbytes,
        peers={"torch": lambda: reference.draw_tokens(probs, uniform)},
    )
