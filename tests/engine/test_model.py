"""The model equals transformers for every family, and itself bit for bit in any company."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from tests.engine.paging import PagedModel, PagedSequence
from tests.kernels.rows import threads
from tests.tiny_model import TinyShape, write_tiny_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied": {"tied": False},
    "llama-biases": {"config": {"attention_bias": True, "mlp_bias": True}},
    "llama-no-groups": {"shape": TinyShape(num_heads=3, num_kv_heads=3, head_dim=12, intermediate_size=63)},
    "llama-one-kv-head": {"shape": TinyShape(num_heads=4, num_kv_heads=1, head_dim=64)},
    "llama-rope-linear-old": {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}},
    "llama-rope-llama3": {"config": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}},
    "llama-rope-llama3-new": {"config": {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}},
    "mistral": {"architecture": "MistralForCausalLM", "tied": False},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "tied": False},
}


def prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = write_tiny_model(tmp_path_factory.mktemp(request.param), **VARIANTS[request.param])
    return load_model(folder, torch.float32)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, **VARIANTS[variant])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    token_ids = prompt(150)
    with torch.inference_mode():
        expected = theirs(torch.tensor([token_ids])).logits[0]

    paged = PagedModel(load_model(folder, torch.float32))
    other, _ = paged.prefill(prompt(40, seed=1), 7)
    seq, chunked = paged.prefill(token_ids[:140], 33)
    decoded = []
    for token_id in token_ids[140:]:  # one by one, beside another sequence
        seq.token_ids.append(token_id)
        other.token_ids.append(token_id)
        decoded.append(paged.step([(other, 1), (seq, 1)])[1:])
    logits = torch.cat((chunked, *decoded))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_bits_do_not_depend_on_chunk_size_or_threads(model: LlamaModel) -> None:
    token_ids = prompt(90)
    _, expected = PagedModel(model).prefill(token_ids, 90)
    for chunk, count in ((1, 1), (2, 2), (3, 2), (16, 1), (33, 2), (64, 1), (90, 1)):
        with threads(count):
            _, got = PagedModel(model, seed=chunk, block_size=8).prefill(token_ids, chunk)
        assert torch.equal(got, expected), f"chunks of {chunk} with {count} threads"


def test_bits_do_not_depend_on_threads_that_come_and_go_between_layers(
    model: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids, counts, seen = prompt(90), itertools.cycle((1, 2, 2, 1, 2)), []
    _, expected = PagedModel(model).prefill(token_ids, 33)

    def choose_threads() -> None:
        seen.append(next(counts))
        torch.set_num_threads(seen[-1])

    monkeypatch.setattr(model, "choose_threads", choose_threads)
    with threads(1):
        _, got = PagedModel(model).prefill(token_ids, 33)
    assert torch.equal(got, expected)
    assert len(seen) == 3 * (1 + model.config.num_layers)


def test_bits_do_not_depend_on_the_batch(model: LlamaModel) -> None:
    """Decodes and prompt chunks mixed, at 1, 2, 3, 8 and 33 sequences."""
    paged = PagedModel(model)
    alone = []
    for i in range(33):
        seq, logits = paged.prefill(prompt(1 + 5 * i % 70, seed=i), 1000)
        alone.append(logits[-1])
    for num_seqs in (1, 2, 3, 8, 33):
        paged = PagedModel(model, seed=num_seqs)
        seqs = [PagedSequence(prompt(1 + 5 * i % 70, seed=i)) for i in range(num_seqs)]
        for seq in seqs:  # all but the last token, or a part of it
            if len(seq.token_ids) > 1:
                paged.step([(seq, max(1, (len(seq.token_ids) - 1) // (1 + len(seq.token_ids) % 3)))])
        for count in (2, 1):
            with threads(count):
                logits = paged.step([(seq, len(seq.token_ids) - seq.num_computed) for seq in seqs])
            for i, row in enumerate(logits):
                assert torch.equal(row, alone[i]), f"sequence {i} of {num_seqs}"
            for seq in seqs:
                seq.num_computed = len(seq.token_ids) - 1  # the last token once more, as a decode


def test_more_rows_than_one_piece_of_a_dense_layer_change_nothing(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, shape=TinyShape(max_position_embeddings=1024))
    model = load_model(folder, torch.float32)
    token_ids = prompt(700)
    _, whole = PagedModel(model).prefill(token_ids, 700)
    _, parts = PagedModel(model).prefill(token_ids, 256)
    assert torch.equal(whole, parts)


def test_a_batch_without_logit_rows_skips_the_head(model: LlamaModel) -> None:
    logits = PagedModel(model).step([(PagedSequence(prompt(20)), 12)], "none")
    assert logits.shape == (0, 512)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_and_invariant(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    _, expected = PagedModel(load_model(folder, torch.float32)).prefill(prompt(60), 60)
    model = load_model(folder, dtype)
    _, got = PagedModel(model).prefill(prompt(60), 60)
    _, in_chunks = PagedModel(model).prefill(prompt(60), 1)
    assert torch.equal(got, in_chunks)
    assert (got.log_softmax(-1) - expected.log_softmax(-1)).abs().mean() < 0.2
