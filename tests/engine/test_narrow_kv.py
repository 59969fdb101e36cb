"""KV blocks of 16 bits: a model over them computes as over float32 ones whose numbers were rounded when written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.common.requests import SamplingParams
from kvferry.kernels import ops
from kvferry.services.engine.loader import load_model, model_fingerprint
from kvferry.services.engine.model import LlamaModel
from tests.e2e.alone import Alone
from tests.engine.paging import PagedModel, PagedSequence
from tests.engine.test_model import prompt
from tests.engine.test_prompt_logprobs import make_engine, run, submit
from tests.kernels.rows import threads
from tests.tiny_model import write_tiny_model

NARROW = [torch.bfloat16, torch.float16]
TOKENS, LONG = prompt(90), prompt(150, seed=1)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    folder = write_tiny_model(tmp_path_factory.mktemp("model"), architecture=request.param)
    return load_model(folder, torch.float32)


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_a_token_attends_to_keys_and_values_as_they_are_kept_its_own_too(
    model: LlamaModel, kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, got = PagedModel(model, kv_dtype=kv_dtype).prefill(TOKENS, 33)
    _, unrounded = PagedModel(model).prefill(TOKENS, 33)
    write = ops.rotary_and_write_kv

    def write_rounded(qkv: torch.Tensor, cos_sin: torch.Tensor, kv_cache: torch.Tensor, *rest: Any) -> torch.Tensor:
        query = write(qkv, cos_sin, kv_cache, *rest)
        kv_cache.copy_(kv_cache.to(kv_dtype))
        return query

    monkeypatch.setattr(ops, "rotary_and_write_kv", write_rounded)
    _, expected = PagedModel(model).prefill(TOKENS, 33)
    assert torch.equal(got, expected)
    assert not torch.equal(got, unrounded)


def test_an_engine_gives_each_sequence_what_it_gives_alone(model: LlamaModel) -> None:
    """Two of which one is preempted, then three samples that begin in the cache and copy the block they share."""
    engine, reports = make_engine(model, 12, 16, torch.bfloat16)
    alone = Alone(model, torch.bfloat16)
    params = SamplingParams(max_tokens=60, temperature=0.9, seed=5, logprobs=0, ignore_eos=True)
    submit(engine, "first", TOKENS[:30], params)
    engine.step()
    engine.step()
    second = submit(engine, "second", LONG, replace(params, max_tokens=9))
    run(engine)
    assert second.num_preemptions > 0
    submit(engine, "third", LONG[:100], replace(params, max_tokens=9), n=3)
    run(engine)
    found: dict[str, list[tuple[int, float | None]]] = {}
    for token in (token for report in reports for token in report.tokens):
        found.setdefault(token.key, []).append((token.token_id, token.logprobs.logprob if token.logprobs else None))
    short = replace(params, max_tokens=9)
    wanted = {"first": (TOKENS[:30], params, 0), "second": (LONG, short, 0)}
    wanted |= {key: (LONG[:100], short, i) for i, key in enumerate(("third", "third1", "third2"))}
    for key, (prompt_ids, given, index) in wanted.items():
        expected = [(t.token_id, t.logprob) for t in alone.generate(prompt_ids, given, index)]
        assert found[key] == expected, key


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_bits_depend_on_no_chunk_batch_thread_or_prefix_hit(model: LlamaModel, kv_dtype: torch.dtype) -> None:
    _, expected = PagedModel(model, kv_dtype=kv_dtype).prefill(TOKENS, 90)
    for chunk, block_size, count in ((1, 8, 1), (2, 128, 2), (33, 24, 1)):
        with threads(count):
            _, got = PagedModel(model, 100, block_size, chunk, kv_dtype).prefill(TOKENS, chunk)
        assert torch.equal(got, expected), f"chunks of {chunk}, blocks of {block_size}, {count} threads"
    paged = PagedModel(model, kv_dtype=kv_dtype)
    seqs = [PagedSequence(TOKENS[:length]) for length in (90, 3, 41)]
    rows = paged.step([(seq, len(seq.token_ids)) for seq in seqs])
    assert torch.equal(rows, expected[[89, 2, 40]])
    hit = PagedSequence(TOKENS, num_computed=64, table=seqs[0].table[:4])
    assert torch.equal(paged.step([(hit, 26)], "all"), expected[64:])


def test_each_kv_dtype_has_block_names_of_its_own(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    prints = {model_fingerprint(folder, torch.float32, kv_dtype=dtype) for dtype in (torch.float32, *NARROW)}
    assert len(prints) == 3
    assert model_fingerprint(folder, torch.float32) in prints
