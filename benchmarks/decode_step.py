"""Decode steps of a few layers for `benchmarks kernels`: one CUDA graph against kernels that Python starts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernel_cases import Case, Sizes
from kvferry.kernels import ops
from kvferry.services.engine.batch import Batch
from kvferry.services.engine.cuda_graphs import Capture
from kvferry.services.engine.model import LayerWeights, LlamaModel, ModelWeights
from kvferry.services.engine.model_config import ModelConfig, RopeConfig

VOCAB = 256


def step_cases(
    sizes: Sizes, dtype: torch.dtype, device: torch.device, capture: Capture | None = None
) -> Iterator[Case]:
    """One sequence, then `sizes.num_seqs`. The truth is the eager step; its first row alone has the same bits."""
    config = _config(sizes)
    weights, num_bytes = _weights(sizes, config, dtype, device)
    eager, captured = LlamaModel(config, weights), LlamaModel(config, weights)
    width = -(-sizes.context // sizes.block_size)
    dims = (sizes.num_seqs * width, sizes.num_layers, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    pool = torch.randn(dims, dtype=dtype, device=device)
    captured.capture_decodes(pool, sizes.num_seqs, sizes.context, capture)
    tables = torch.randperm(len(pool), device=device).view(sizes.num_seqs, width)
    alone = _batch(sizes, tables[:1])
    for num_seqs in (1, sizes.num_seqs):
        batch = _batch(sizes, tables[:num_seqs])
        yield Case(
            f"decode step, {sizes.num_layers} layers, {num_seqs} x {sizes.context} keys",
            lambda batch=batch: captured.hidden(batch, pool),
            lambda batch=batch: eager.hidden(batch, pool),
            lambda: eager.hidden(alone, pool),
            num_bytes + num_seqs * width * pool[0].nbytes,
            peers={"eager": lambda batch=batch: eager.hidden(batch, pool)},
            is_exact=True,
        )


def _batch(sizes: Sizes, tables: torch.Tensor) -> Batch:
    """Each sequence decodes its last token."""
    num_seqs, position = len(tables), sizes.context - 1
    token_ids = torch.arange(num_seqs, device=tables.device) % VOCAB
    slots = tables[:, position // sizes.block_size] * sizes.block_size + position % sizes.block_size
    starts, rows = tuple(range(num_seqs + 1)), torch.arange(num_seqs, device=tables.device)
    return Batch(token_ids, torch.full_like(rows, position), slots, tables, starts, (position,) * num_seqs, rows)


def _config(sizes: Sizes) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=500000.0),
        tied_head=True,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        eos_token_ids=(),
    )


def _weights(sizes: Sizes, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[ModelWeights, int]:
    """Random ones, and the bytes that a step reads of them."""
    num_bytes = 0

    def linear(out: int, width: int) -> ops.Linear:
        nonlocal num_bytes
        weight = (torch.randn(out, width, device=device) / width**0.5).to(dtype)
        num_bytes += weight.nbytes
        return ops.pack_linear(weight, None, batch_invariant=True)

    heads = sizes.num_heads * sizes.head_dim
    norm = torch.ones(sizes.hidden, dtype=dtype, device=device)
    layers = tuple(
        LayerWeights(
            attention_norm=norm,
            qkv=linear(heads + 2 * sizes.num_kv_heads * sizes.head_dim, sizes.hidden),
            q_norm=None,
            k_norm=None,
            o=linear(sizes.hidden, heads),
            mlp_norm=norm,
            gate_up=linear(2 * sizes.inner, sizes.hidden),
            down=linear(sizes.hidden, sizes.inner),
        )
        for _ in range(config.num_layers)
    )
    embedding = torch.randn(VOCAB, sizes.hidden, device=device).to(dtype)
    return ModelWeights(embedding, layers, norm, ops.pack_linear(embedding, None, batch_invariant=True)), num_bytes
