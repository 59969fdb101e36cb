"""Kernels run on the GPU where there is one, else in Triton's interpreter, on the CPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from kvferry.kernels import ops, reference

HAS_GPU = torch.cuda.is_available()
collect_ignore_glob = [] if find_spec("triton") else ["test_*"]

if find_spec("triton") and not HAS_GPU:
    from tests.kernels.triton.interpreter import import_kernels_interpreted

    import_kernels_interpreted()


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not HAS_GPU:
        pytest.skip("needs an NVIDIA GPU")
    if request.param == "interpreter" and HAS_GPU:
        pytest.skip("the same test runs on the GPU")
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def on_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device, and where that is the CPU, ops that take it for a GPU."""
    if device.type == "cpu":
        monkeypatch.setattr(ops, "_is_on_gpu", lambda *_: True)
        monkeypatch.setattr(ops, "_is_compiled", lambda _: False)
        monkeypatch.setattr(ops, "_is_compiled_pool", lambda _: False)
    for name in ("paged_attention", "rms_norm", "silu_and_mul", "rotary_and_write_kv", "filter_tokens", "draw_tokens"):
        monkeypatch.delattr(reference, name)  # it must not be the reference that serves
    for name in ("gather_blocks", "scatter_blocks"):
        monkeypatch.delattr(reference, name)
    return device
