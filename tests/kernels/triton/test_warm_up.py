"""Before a node takes work, every kernel that a prompt needs has run once, and nothing has been written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvferry.kernels.triton import attention, dense, elementwise, launch, sampling
from kvferry.services.engine.host_mirror import HostMirror
from kvferry.services.engine.loader import load_model
from kvferry.services.engine.warm_up import DEPTH, warm_up
from tests.tiny_model import TinyShape, write_tiny_model

SHAPE = TinyShape(hidden_size=20, intermediate_size=12, num_layers=1, num_heads=3, num_kv_heads=1)

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")
"""Of the interpreter, about what nobody has written."""


@pytest.mark.parametrize("max_model_len", [512, DEPTH, 5])
def test_every_kernel_of_prompts_runs_and_no_sequence_s_slot_is_written(
    max_model_len: int, on_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(write_tiny_model(tmp_path, shape=SHAPE), torch.float32, on_gpu, batch_invariant=True)
    pool = torch.full((40, 1, 2, 1, 16, 16), torch.nan, device=on_gpu)
    found = set[tuple[str, object]]()

    def noted(kernel: Any, grid: tuple[int, ...], *arguments: Any, **rest: Any) -> None:
        if 0 not in grid:
            name = getattr(kernel, "__name__", None) or kernel.fn.__name__
            found.add((name, rest.get("is_split")))
        original(kernel, grid, *arguments, **rest)

    original: Callable[..., None] = launch.launch
    for module in (attention, dense, elementwise, sampling):
        monkeypatch.setattr(module, "launch", noted)
    warm_up(model, pool, HostMirror(pool, torch.zeros_like(pool, device="cpu")), max_model_len)
    assert pool.isnan().all()
    wanted = {("paged_attention", False), ("rotary_and_write_kv", None), ("matmul", False), ("add_rms_norm", None)}
    wanted |= {("silu_and_mul", None), ("move_blocks", None), ("filter_tokens", None), ("draw_tokens", None)}
    if max_model_len > DEPTH:
        wanted |= {("paged_attention", True), ("merge_splits", None)}
    assert found == wanted
