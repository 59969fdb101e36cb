"""The CPU kernels compile for processors that are not here, and those for AVX2 have the bits of this one's own."""

from __future__ import annotations

import io
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Callable

import pytest
import torch

from kvferry.kernels import ops
from kvferry.kernels.cpu import attention, dense, elementwise, narrow, native, sampling
from tests.kernels.rows import randn

AVX2 = ("x86_64-unknown-linux-gnu", "x86-64-v3")
OTHERS = (
    ("x86_64-unknown-linux-gnu", "x86-64"),  # without fused multiply-adds, which then are calls
    ("x86_64-unknown-linux-gnu", "sapphirerapids"),
    ("aarch64-unknown-linux-gnu", "neoverse-n1"),
    ("arm64-apple-darwin", "apple-m1"),
)
MAGIC = {"linux": b"\x7fELF", "darwin": b"\xcf\xfa\xed\xfe"}


def build(*target: str) -> bytes:
    command = (sys.executable, "-m", "kvferry.kernels.cpu.jit.build", *target)
    return subprocess.run(command, env=os.environ | {"NUMBA_OPT": "0"}, capture_output=True, check=True).stdout


@pytest.mark.parametrize("target", OTHERS, ids=lambda target: target[1])
def test_every_kernel_compiles_for_other_processors(target: tuple[str, str]) -> None:
    with zipfile.ZipFile(io.BytesIO(build(*target))) as files:
        names = [entry.split("/")[0] for entry in files.namelist()]
        assert sorted(names) == sorted(native.kernels()._address)
        (magic,) = (found for system, found in MAGIC.items() if system in target[0])
        assert all(files.read(entry).startswith(magic) for entry in files.namelist())


@pytest.fixture(scope="module")
def avx2() -> native.Kernels:
    if platform.machine() != "x86_64":
        pytest.skip(f"code for AVX2 does not run on {platform.machine()}")
    return native.Kernels(build(*AVX2))


def _dense(weight_format: str) -> torch.Tensor:
    layer = ops.pack_linear(randn(130, 1100), weight_format=weight_format)
    return torch.cat([layer(randn(rows, 1100, seed=rows)) for rows in (1, 2, 3, 8, 33)])


def _dense_with_offsets() -> torch.Tensor:
    layer = narrow.NarrowLinear(narrow.narrowed(randn(130, 1100), "int8 with offsets"))
    return torch.cat([layer(randn(rows, 1100, seed=rows)) for rows in (1, 2, 3, 8, 33)])


def _attention() -> torch.Tensor:
    """A prompt's chunk, a decode and a short chunk over scattered blocks, behind 60, 100 and 126 keys."""
    pool = randn(24, 1, 2, 3, 16, 64, seed=1)
    tables = torch.randperm(24, generator=torch.Generator().manual_seed(2)).view(3, 8)
    plan = attention.plan_attention(tables, (0, 37, 38, 40), (60, 100, 126))
    return attention.paged_attention(randn(40, 9, 64, seed=3), pool, 0, plan, 0.125)


def _elementwise() -> torch.Tensor:
    x = randn(19, 640)
    norm = elementwise.add_rms_norm(x.clone(), x, x[0], 1e-5)
    pool = torch.zeros(4, 1, 2, 2, 16, 64)
    query = elementwise.rotary_and_write_kv(
        x.clone(), x[:, :64].contiguous(), pool, 0, torch.arange(19), None, None, 0.0
    )
    return torch.cat([part.flatten() for part in (elementwise.silu_and_mul(x), norm, query, pool)])


@pytest.mark.parametrize(
    "compute",
    [
        lambda: _dense("float32"),
        lambda: _dense("int8"),
        _dense_with_offsets,
        lambda: _dense("bfloat16"),
        _attention,
        _elementwise,
    ],
    ids=["float32", "int8", "int8 with offsets", "bfloat16", "attention", "elementwise"],
)
def test_code_for_avx2_has_the_bits_of_this_processors_own(
    compute: Callable[[], torch.Tensor], avx2: native.Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = compute()
    for module in (attention, dense, elementwise, narrow, sampling):
        monkeypatch.setattr(module, "kernels", lambda: avx2)
    assert torch.equal(compute(), here)
