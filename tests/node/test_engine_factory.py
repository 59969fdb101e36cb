"""Where and in what a node computes, and how much memory its pool gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.common.config import ClusterConfig, Config, EngineConfig, NodeConfig
from kvferry.common.errors import ConfigError, LayoutMismatch
from kvferry.common.hashing import root_name
from kvferry.common.nodes import LayoutCard, Role
from kvferry.common.requests import SamplingParams
from kvferry.kernels.cpu.narrow import NarrowLinear
from kvferry.services.engine.cuda_graphs import DecodeGraphs
from kvferry.services.engine.decode_replays import DecodeReplays
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.outputs import StepReport, TokenOutput
from kvferry.services.engine.runner import TorchRunner
from kvferry.services.engine.sequence import Sequence
from kvferry.services.node import engine_factory
from kvferry.services.node.engine_factory import (
    GPU_WORKSPACE_BYTES,
    _capture_decodes,
    build_engine,
    dtypes,
    gpu_kv_cache_bytes,
)
from kvferry.services.node.metrics import cache_config_info
from kvferry.services.rpc.convert import card_from_pb, card_to_pb

GIB = 2**30
GPU = torch.device("cuda")


def test_a_gpu_gives_its_share_less_the_weights_and_the_workspace() -> None:
    assert gpu_kv_cache_bytes(70 * GIB, 80 * GIB, 8 * GIB, 0.9) == 72 * GIB - 8 * GIB - GPU_WORKSPACE_BYTES


def test_what_others_use_of_a_gpu_is_not_taken() -> None:
    assert gpu_kv_cache_bytes(30 * GIB, 80 * GIB, 8 * GIB, 0.9) == 30 * GIB - GPU_WORKSPACE_BYTES


def test_two_nodes_that_start_together_on_one_gpu_find_room() -> None:
    """Neither has taken its pool when both look, or one has: in any order."""
    own, total = 2 * GIB, 80 * GIB
    early = gpu_kv_cache_bytes(total - 2 * own, total, own, 0.45)
    late = gpu_kv_cache_bytes(total - 2 * own - early, total, own, 0.45)
    assert early == late == 36 * GIB - own - GPU_WORKSPACE_BYTES
    assert 2 * (early + own + GPU_WORKSPACE_BYTES) < total


def test_a_gpu_whose_share_is_used_up_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"0\.5 of 8\.0 GiB.*weights take 3\.0 GiB, 4\.0 GiB are in use"):
        gpu_kv_cache_bytes(4 * GIB, 8 * GIB, 3 * GIB, 0.5)


@pytest.mark.parametrize(("mirror_memory", "limited"), [(None, 3 * GIB), (GIB, GIB), (90 * GIB, 60 * GIB)])
def test_a_gpu_s_pool_is_no_larger_than_its_mirror_may_be(
    mirror_memory: int | None, limited: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (75 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 12 * GIB - GPU_WORKSPACE_BYTES)
    monkeypatch.setattr(engine_factory, "available_memory_bytes", lambda: 6 * GIB)
    engine = EngineConfig(kv_mirror_memory=mirror_memory)
    card = LayoutCard("m", "n", "bfloat16", 16, 32, 8, 128, "0")
    assert card.block_bytes == 2 * 2**20
    assert engine_factory._num_blocks(engine, card, GPU) == limited // card.block_bytes
    assert ("limited to" in caplog.text) == (limited < 60 * GIB)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_is_refused_where_torch_has_none(tiny_model: Path) -> None:
    config = Config(cluster=ClusterConfig(model=str(tiny_model)), engine=EngineConfig(device="cuda"))
    with pytest.raises(ConfigError, match=r"device cuda: torch .* is a build for CPUs; use --device cpu"):
        build_engine(config, Role.BOTH, "none", lambda report: None)


def test_why_torch_finds_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system\nis too old (found version 12020).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"CUDA 13\.0 but finds no GPU \(The NVIDIA driver on your system is too old"):
        engine_factory._device("cuda")


def test_nodes_that_keep_weights_differently_share_no_blocks(tiny_model: Path) -> None:
    cards, widths = [], []
    for engine in ({}, {"dtype": "bfloat16"}, {"quantization": "int8"}):
        config = Config(
            cluster=ClusterConfig(model=str(tiny_model)),
            engine=EngineConfig(device="cpu", num_threads=1, num_blocks_override=8, **engine),
            node=NodeConfig(transports=("grpc",)),
        )
        built = build_engine(config, Role.BOTH, "none", lambda report: None)
        assert isinstance(built.engine.runner, TorchRunner)
        head = built.engine.runner.model.weights.head
        widths.append(head._packed.element_size() if isinstance(head, NarrowLinear) else 4)
        cards.append(built.card)
    assert widths == [4, 2, 1]
    assert [card.weights for card in cards] == ["float32", "bfloat16", "int8"]
    assert {card.dtype for card in cards} == {"float32"}  # of KV blocks
    assert len({root_name(card.model_fingerprint, card.numerics_id) for card in cards}) == 3
    with pytest.raises(LayoutMismatch, match="peer has weights 'int8', this node has 'bfloat16'"):
        cards[1].check_compatible(cards[2], "peer")
    assert card_from_pb(card_to_pb(cards[2])) == cards[2]


def test_nodes_that_keep_kv_differently_share_no_blocks(tiny_model: Path) -> None:
    built = []
    for kv_cache_dtype in ("auto", "float32", "bfloat16", "float16"):
        config = Config(
            cluster=ClusterConfig(model=str(tiny_model)),
            engine=EngineConfig.model_validate(
                {"device": "cpu", "num_threads": 1, "kv_cache_memory": 2**20, "kv_cache_dtype": kv_cache_dtype}
            ),
            node=NodeConfig(transports=("grpc",)),
        )
        built.append(build_engine(config, Role.BOTH, "none", lambda report: None))
    auto, wide, *narrow = (one.card for one in built)
    assert auto == wide
    assert [card.dtype for card in (wide, *narrow)] == ["float32", "bfloat16", "float16"]
    assert [wide.block_bytes // card.block_bytes for card in narrow] == [2, 2]
    num_blocks = [one.engine.pool.num_blocks for one in built]
    assert num_blocks[2:] == [2 * num_blocks[0]] * 2
    for one in built:
        assert isinstance(one.engine.runner, TorchRunner)
        pool = one.engine.runner.kv_cache
        assert (str(pool.dtype), pool.nbytes) == (f"torch.{one.card.dtype}", one.segment.buffer.nbytes)
    assert len({root_name(card.model_fingerprint, card.numerics_id) for card in (wide, *narrow)}) == 3
    with pytest.raises(LayoutMismatch, match="peer has kv_cache_dtype 'bfloat16', this node has 'float32'"):
        wide.check_compatible(narrow[0], "peer")
    cache = cache_config_info(EngineConfig(), narrow[0], num_blocks[2])
    assert (cache["cache_dtype"], cache["block_bytes"]) == ("bfloat16", str(wide.block_bytes // 2))


@pytest.mark.parametrize("kept", ["auto", "bfloat16"])
def test_a_gpu_computes_in_the_dtype_and_keeps_kv_in_it(kept: str) -> None:
    engine = EngineConfig.model_validate({"dtype": "bfloat16", "kv_cache_dtype": kept})
    assert dtypes(engine, GPU) == (torch.bfloat16, torch.bfloat16)
    assert dtypes(EngineConfig(), GPU) == (torch.float32, torch.float32)
    on_cpu = torch.float32 if kept == "auto" else torch.bfloat16
    assert dtypes(engine, torch.device("cpu")) == (torch.float32, on_cpu)


def test_kv_in_another_dtype_than_the_model_s_is_refused_on_a_gpu(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = Config(cluster=ClusterConfig(model=str(tiny_model)), engine=EngineConfig(kv_cache_dtype="float16"))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype float16: on cuda .* in float32 \(dtype\): use auto"):
        build_engine(config, Role.BOTH, "none", lambda report: None)


def test_narrow_weights_are_refused_on_a_gpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = Config(cluster=ClusterConfig(model=str(tiny_model)), engine=EngineConfig(quantization="int8"))
    with pytest.raises(ConfigError, match="weights are kept as int8 on CPU only, and this node computes on cuda"):
        build_engine(config, Role.BOTH, "none", lambda report: None)


def test_where_no_kernel_can_be_captured_decodes_stay_eager_and_it_is_said(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_model(tiny_model, torch.float32)
    with caplog.at_level("WARNING", "kvferry.node"):
        _capture_decodes(model, torch.zeros(4, 2, 2, 2, 16, 16), 2, 48)
    assert "no CUDA graphs for decode steps" in caplog.text
    assert model._decode_graphs is None


@pytest.mark.parametrize(("asked", "num_threads"), [(None, 3), (1, 1)])
def test_a_node_computes_with_the_cores_that_its_control_group_leaves_it(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, num_threads: int
) -> None:
    monkeypatch.setattr(engine_factory, "available_cores", lambda: 3)
    config = Config(
        cluster=ClusterConfig(model=str(tiny_model)),
        engine=EngineConfig(device="cpu", num_threads=asked, num_blocks_override=8),
        node=NodeConfig(transports=("grpc",)),
    )
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert build_engine(config, Role.BOTH, "none", lambda report: None).engine.runner.num_threads == num_threads
    finally:
        torch.set_num_threads(before)


def generated(folder: Path, **engine: object) -> list[TokenOutput]:
    """What a node makes of six prompts at once, four of which fit into a step."""
    reports: list[StepReport] = []
    config = Config(
        cluster=ClusterConfig(model=str(folder)),
        engine=EngineConfig.model_validate({"num_threads": 1, "num_blocks_override": 64, "max_num_seqs": 4} | engine),
        node=NodeConfig(transports=("grpc",)),
    )
    built = build_engine(config, Role.BOTH, "none", reports.append)
    root = root_name(built.card.model_fingerprint, built.card.numerics_id)
    for i in range(6):
        params = SamplingParams(max_tokens=10 + i, temperature=0.8, top_p=0.9, seed=i, logprobs=1, ignore_eos=True)
        prompt = [3 + (7 * i + 11 * j) % 500 for j in range(10 + 40 * i)]
        built.engine.submit(Sequence(str(i), prompt, len(prompt), root, built.card.block_size, params))
    while built.engine.step():
        pass
    found = [token for report in reports for token in report.tokens]
    assert len(found) == sum(10 + i for i in range(6))
    return sorted((replace(token, first=None) for token in found), key=lambda token: token.key)


def count_runs(monkeypatch: pytest.MonkeyPatch, steps: type[DecodeReplays] | type[DecodeGraphs]) -> list[object]:
    """One entry for each step that goes that way from now on."""
    found: list[object] = []
    run: Any = steps.run

    def counted(*arguments: Any) -> torch.Tensor:
        found.append(arguments[0])
        result: torch.Tensor = run(*arguments)
        return result

    monkeypatch.setattr(steps, "run", counted)
    return found


def test_an_eager_node_gives_the_tokens_of_one_that_replays(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = count_runs(monkeypatch, DecodeReplays)
    eager = generated(tiny_model, device="cpu", enforce_eager=True)
    assert not replayed
    assert eager == generated(tiny_model, device="cpu")
    assert replayed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_node_on_a_gpu_gives_the_same_tokens_with_cuda_graphs(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    gpu = {"device": "cuda", "dtype": dtype, "batch_invariant": True}
    by_graphs = count_runs(monkeypatch, DecodeGraphs)
    eager = generated(tiny_model, **gpu, enforce_eager=True)
    assert not by_graphs
    assert eager == generated(tiny_model, **gpu)
    assert by_graphs
