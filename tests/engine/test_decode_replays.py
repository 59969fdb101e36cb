"""Decode steps by replay: the bits of steps that Python runs, while sequences join, leave and change pools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from tests.engine.paging import PagedModel, PagedSequence
from tests.engine.test_model import prompt
from tests.kernels.rows import threads
from tests.tiny_model import write_tiny_model


def decoded(model: LlamaModel, seed: int, kv_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of steps whose sequences come and go: 1, then 2 and 3, a chunk among them, then 1 again, past a block."""
    paged = PagedModel(model, seed=seed, block_size=8, kv_dtype=kv_dtype)
    seqs = [PagedSequence(prompt(length, seed=length)) for length in (5, 13, 30)]
    for seq in seqs:
        paged.step([(seq, len(seq.token_ids))])
    rows = []
    for step, active in enumerate([(0,)] * 4 + [(0, 1)] * 3 + [(2, 0, 1)] * 3 + [(0, 2)] * 3 + [(1,)] * 12):
        for i in active:
            seqs[i].token_ids.append(7 + 11 * step + i)
        work = [(seqs[i], 1) for i in active]
        if step == 8:
            work.append((PagedSequence(prompt(9)), 9))
        rows.append(paged.step(work))
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("architecture", "kv_dtype"),
    [
        ("LlamaForCausalLM", torch.float32),
        ("LlamaForCausalLM", torch.bfloat16),
        ("Qwen2ForCausalLM", torch.float32),
        ("Qwen3ForCausalLM", torch.float32),
        ("Qwen3ForCausalLM", torch.float16),
    ],
)
def test_replayed_steps_have_the_bits_of_the_others(architecture: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path, architecture=architecture), torch.float32, weight_format="int8")
    model.enforce_eager = True
    expected = decoded(model, 1, kv_dtype)
    assert model._decode_replays._found == {}
    model.enforce_eager = False
    for count in (1, 2):
        with threads(count):
            for seed in (1, 2):  # two pools
                assert torch.equal(decoded(model, seed, kv_dtype), expected), f"{count} threads, pool {seed}"
    found = model._decode_replays._found
    assert {rows for rows, _ in found} == {1, 2, 3}
    has_bias = architecture == "Qwen2ForCausalLM"  # which torch adds: not recorded
    assert all((entry is None) == has_bias for entry in found.values())
