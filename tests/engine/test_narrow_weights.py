"""Models whose weights are kept in one or two bytes: float32 over the rounded weights, bit for bit, in any company."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file

from kvferry.kernels import ops
from kvferry.kernels.cpu.dense import PackedLinear
from kvferry.kernels.cpu.narrow import NarrowLinear
from kvferry.kernels.ops import WeightFormat
from kvferry.services.engine.loader import load_model, model_fingerprint
from tests.engine.paging import PagedModel, PagedSequence
from tests.kernels.rows import threads
from tests.kernels.test_narrow import NARROW, rounded
from tests.tiny_model import write_tiny_model, write_weights

TOKENS = torch.randint(3, 512, (90,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("weight_format", NARROW)
def test_a_narrow_model_computes_the_bits_of_float32_over_its_rounded_weights(
    weight_format: WeightFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_model(tmp_path, tied=False, architecture="Qwen2ForCausalLM")
    model = load_model(folder, torch.float32, weight_format=weight_format)
    _, got = PagedModel(model).prefill(TOKENS, 90)
    weights = load_file(folder / "model.safetensors")
    dense = {name for name in weights if name.endswith("proj.weight")} | {"lm_head.weight"}
    assert len(dense) == 15  # seven in each of two layers
    write_weights(folder, weights | {name: rounded(weights[name], weight_format) for name in dense})
    unasked = load_model(folder, torch.float32)
    monkeypatch.setattr(ops, "narrowed_exactly", lambda weight: None)
    full = load_model(folder, torch.float32)
    _, expected = PagedModel(full).prefill(TOKENS, 90)
    assert torch.equal(got, expected)
    assert isinstance(full.weights.head, PackedLinear)
    assert isinstance(unasked.weights.head, NarrowLinear), "float32 that loses nothing is kept narrow"
    assert torch.equal(PagedModel(unasked).prefill(TOKENS, 90)[1], expected)


@pytest.mark.parametrize("weight_format", NARROW)
def test_bits_of_a_narrow_model_depend_on_no_chunk_batch_or_thread(weight_format: WeightFormat, tmp_path: Path) -> None:
    model = load_model(write_tiny_model(tmp_path), torch.float32, weight_format=weight_format)
    _, expected = PagedModel(model).prefill(TOKENS, 90)
    for chunk, count in ((1, 1), (2, 2), (33, 1)):
        with threads(count):
            _, got = PagedModel(model, seed=chunk, block_size=8).prefill(TOKENS, chunk)
        assert torch.equal(got, expected), f"chunks of {chunk} with {count} threads"
    seqs = [PagedSequence(TOKENS[:length]) for length in (90, 3, 41)]
    rows = PagedModel(model).step([(seq, len(seq.token_ids)) for seq in seqs])
    assert torch.equal(rows, expected[[89, 2, 40]])


@pytest.mark.parametrize("weight_format", NARROW)
def test_a_node_goes_on_bit_for_bit_from_blocks_that_another_one_computed(
    weight_format: WeightFormat, tmp_path: Path
) -> None:
    """Each has loaded and rounded the model by itself. The full blocks cross, the rest is computed beside others."""
    folder = write_tiny_model(tmp_path)
    prefill, decode, lone = (
        PagedModel(load_model(folder, torch.float32, weight_format=weight_format), seed=seed) for seed in range(3)
    )
    num_full = (len(TOKENS) - 1) // decode.block_size
    filled, _ = prefill.prefill(TOKENS, 33)
    whole, expected = lone.prefill(TOKENS, len(TOKENS))
    seq = PagedSequence([*TOKENS], num_full * decode.block_size, [decode._free.pop() for _ in range(num_full)])
    decode.kv_cache[seq.table] = prefill.kv_cache[filled.table[:num_full]]
    others = [PagedSequence(TOKENS[start:]) for start in (20, 50)]
    got, want = decode.step([(others[0], 7), (seq, len(TOKENS) - seq.num_computed), (others[1], 1)])[1], expected[-1]
    for _ in range(24):
        assert torch.equal(got, want)
        for each in (seq, whole):
            each.token_ids.append(int(want.argmax()))
        (want,) = lone.step([(whole, 1)])
        got = decode.step([(seq, 1), (others[0], 1)])[0]


def test_each_format_has_block_names_of_its_own(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    prints = {model_fingerprint(folder, torch.float32, form) for form in get_args(WeightFormat)}
    assert len(prints) == 4
