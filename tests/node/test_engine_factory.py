"""Where a node computes, and how much memory its pool gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.common.config import ClusterConfig, Config, EngineConfig
from kvferry.common.errors import ConfigError
from kvferry.common.nodes import Role
from kvferry.services.node.engine_factory import GPU_WORKSPACE_BYTES, build_engine, gpu_kv_cache_bytes


def test_a_gpu_gives_its_share_less_what_is_in_use_and_the_workspace() -> None:
    gib = 2**30
    assert gpu_kv_cache_bytes(70 * gib, 80 * gib, 0.9) == 72 * gib - 10 * gib - GPU_WORKSPACE_BYTES


def test_a_gpu_whose_share_is_used_up_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"0\.5 of 8\.0 GiB.*4\.0 GiB are in use"):
        gpu_kv_cache_bytes(4 * 2**30, 8 * 2**30, 0.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_is_refused_where_torch_has_none(tiny_model: Path) -> None:
    config = Config(cluster=ClusterConfig(model=str(tiny_model)), engine=EngineConfig(device="cuda"))
    with pytest.raises(ConfigError, match=r"device cuda: torch .* is a build for CPUs; use --device cpu"):
        build_engine(config, Role.BOTH, "none", lambda report: None)
