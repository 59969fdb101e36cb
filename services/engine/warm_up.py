"""What a GPU's kernels cost only once, paid before a node takes work: compiling them, loading them, torch's own set-up.

A first prompt would wait for it, and its step would be taken for how fast prompts are. Captured decodes warm their own.
"""

from __future__ import annotations

import torch

from kvferry.common.requests import SamplingParams
from kvferry.kernels import ops
from kvferry.services.engine.batch import Batch
from kvferry.services.engine.host_mirror import HostMirror
from kvferry.services.engine.model import LlamaModel
from kvferry.services.engine.sample_rows import SampleRow, SampleRows
from kvferry.services.engine.sampler import sample

CHUNK = 96
"""Tokens of the prompt: more than any tile has rows."""

DEPTH = 320
"""Where a second, short one begins: more than a split has keys, so that its own are split among programs."""


@torch.inference_mode()
def warm_up(model: LlamaModel, kv_cache: torch.Tensor, mirror: HostMirror, max_model_len: int) -> None:
    """Computes prompts whose keys and values are written nowhere, draws tokens, moves block 0 out and in again.

    The pool must hold nothing yet: what is attended to, and copied, is garbage.
    """
    for context_len, num_tokens in ((0, CHUNK), (DEPTH, 1), (DEPTH, 2)):
        num_tokens = min(num_tokens, max_model_len - context_len)
        if num_tokens > 0:
            logits = model.forward(_batch(context_len, num_tokens, kv_cache), kv_cache)
            params = SamplingParams(temperature=1.0, top_k=5, top_p=0.5, seed=0)
            sample(torch.zeros_like(logits), SampleRows.of([SampleRow(params, position=0)]))
    mirror.copy_down([0])
    mirror.copy_up([0])
    if len(kv_cache) > 1:
        ops.copy_blocks(kv_cache, [0], [1])


def _batch(context_len: int, num_tokens: int, kv_cache: torch.Tensor) -> Batch:
    device, block_size = kv_cache.device, kv_cache.shape[4]
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    num_blocks = -(-(context_len + num_tokens) // block_size)
    return Batch(
        token_ids=token_ids,
        positions=context_len + torch.arange(num_tokens, device=device),
        slot_mapping=token_ids - 1,  # written nowhere
        block_tables=torch.zeros(1, num_blocks, dtype=torch.int64, device=device),
        query_starts=(0, num_tokens),
        context_lens=(context_len,),
        logit_rows=token_ids[:1] + num_tokens - 1,
    )
