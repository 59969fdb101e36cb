"""Kernels run on the GPU where there is one, else in Triton's interpreter, on the CPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

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
