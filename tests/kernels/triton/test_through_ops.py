"""What a node with a GPU runs: every op of `kernels/ops.py` finds its kernel, and the whole model keeps the promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvferry.kernels import ops
from kvferry.kernels.triton import elementwise
from kvferry.services.engine.batch import Batch
from kvferry.services.engine.host_mirror import HostMirror
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.model import LlamaModel
from tests.kernels.triton.cases import randn
from tests.tiny_model import TinyShape, write_tiny_model

SHAPE = TinyShape(num_layers=1, num_heads=3, num_kv_heads=1)


def step(model: LlamaModel, pool: torch.Tensor, work: list[tuple[list[int], list[int], int]]) -> torch.Tensor:
    """For each (token ids, block table, number of tokens computed) the logits of all rows that remain."""
    starts, tokens, positions, slots = [0], list[int](), list[int](), list[int]()
    for token_ids, table, computed in work:
        span = range(computed, len(token_ids))
        tokens += token_ids[computed:]
        positions += span
        slots += [table[p // 16] * 16 + p % 16 for p in span]
        starts.append(len(tokens))
    width = max(len(table) for _, table, _ in work)
    tables = torch.tensor([table + [0] * (width - len(table)) for _, table, _ in work])
    columns = [torch.tensor(one).to(pool.device) for one in (tokens, positions, slots)]
    rows = torch.arange(len(tokens)).to(pool.device)
    contexts = tuple(computed for _, _, computed in work)
    batch = Batch(*columns, tables.to(pool.device), tuple(starts), contexts, rows)
    return model.forward(batch, pool)


def empty_pool(model: LlamaModel, num_blocks: int = 8) -> torch.Tensor:
    dims = (num_blocks, model.config.num_layers, 2, model.config.num_kv_heads, 16, model.config.head_dim)
    return torch.full(dims, torch.nan, dtype=model.dtype, device=model.device)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)], ids=str)
def test_a_model_on_these_kernels_is_near_the_cpu_s_and_equals_itself_bit_for_bit(
    dtype: torch.dtype, tolerance: float, device: torch.device, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = write_tiny_model(tmp_path, architecture="Qwen3ForCausalLM", shape=SHAPE)
    token_ids, other = list(range(3, 39)), list(range(100, 107))
    work = [(token_ids, [5, 0, 3], 0)]  # 36 tokens in three blocks
    plain = load_model(folder, torch.float32)
    expected = step(plain, empty_pool(plain), work)

    request.getfixturevalue("on_gpu")
    model = load_model(folder, dtype, device, batch_invariant=True)
    whole = step(model, empty_pool(model), work)
    torch.testing.assert_close(whole.cpu(), expected, atol=tolerance, rtol=tolerance)

    pool = empty_pool(model)
    chunk = step(model, pool, [(other, [7], 0), (token_ids[:27], [5, 0], 0)])[7:]
    decode = step(model, pool, [([*other, 9], [7], 7), (token_ids[:28], [5, 0], 27)])[1:]
    rest = step(model, pool, [(token_ids, [5, 0, 3], 28)])
    assert torch.equal(torch.cat((chunk, decode, rest)), whole)


def test_draws_and_moves_of_blocks_find_their_kernels(on_gpu: torch.device) -> None:
    probs = torch.tensor([[0.1, 0.6, 0.3]], device=on_gpu)
    one = torch.ones(1, device=on_gpu)
    kept = ops.filter_tokens(probs, 2 * one.long(), one.double(), 0 * one)
    assert kept.tolist() == (probs * torch.tensor([[0, 1, 1]], device=on_gpu)).tolist()
    assert ops.draw_tokens(kept, 0.9 * one.double()).tolist() == [2]

    pool = randn(5, 1, 2, 1, 4, 8).to(on_gpu)
    before, host = pool.clone(), torch.zeros(5, 1, 2, 1, 4, 8)
    mirror = HostMirror(pool, host)
    mirror.copy_down([3, 0])
    assert torch.equal(host[[3, 0]], before[[3, 0]].cpu())
    host[1] = 7
    mirror.copy_up([1])
    ops.copy_blocks(pool, [1, 4], [2, 0])
    assert torch.equal(pool[[1, 2]], torch.full_like(before[:2], 7))
    assert torch.equal(pool[0], before[4])


def test_copies_that_build_on_each_other_are_done_in_order(device: torch.device) -> None:
    pool = randn(4, 1, 2, 1, 4, 8).to(device)
    before = pool.clone()
    ops.copy_blocks(pool, [0, 2], [1, 0])  # block 0 is given away, then overwritten
    assert torch.equal(pool[1], before[0])
    assert torch.equal(pool[0], before[2])


def test_copies_that_build_on_each_other_are_never_one_launch(
    on_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose copies are made at once, in no order; the interpreter's come one after the other and would not tell."""
    pool, launched = randn(4, 1, 2, 1, 4, 8).to(on_gpu), []
    before = pool.clone()
    monkeypatch.setattr(elementwise, "copy_blocks", lambda *arguments: launched.append(arguments))
    ops.copy_blocks(pool, [0, 1], [1, 2])
    assert torch.equal(pool[:3], before[[0, 0, 0]])
    assert not launched
    ops.copy_blocks(pool, [0, 1], [2, 3])
    assert launched


def test_the_flag_decides_on_a_gpu_and_is_part_of_the_numerics(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Example")
    monkeypatch.setattr(ops, "_HAS_TRITON", True)
    gpu, dtype = torch.device("cuda"), torch.bfloat16
    assert not ops.is_batch_invariant(gpu, dtype)
    assert ops.is_batch_invariant(gpu, dtype, wanted=True)
    ids = {ops.numerics_id(gpu, dtype), ops.numerics_id(gpu, dtype, True), ops.numerics_id(gpu, torch.float32, True)}
    assert len(ids) == 3
    assert ops.numerics_id(gpu, dtype, True, "bfloat16", torch.float32) not in ids
    monkeypatch.setattr(ops, "_HAS_TRITON", False)
    assert not ops.is_batch_invariant(gpu, dtype, wanted=True)
    assert "triton" not in ops.numerics_id(gpu, dtype, True)


def test_a_node_without_a_gpu_never_imports_triton() -> None:
    code = (
        "import sys, torch, kvferry.services.node.engine_factory; from kvferry.kernels import ops\n"
        "ops.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5); ops.pack_linear(torch.ones(4, 4), batch_invariant=True)\n"
        "print('triton' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False"]
