"""Every GPU kernel compiles for every architecture, spills nothing, and keeps to one order of sums. Needs no GPU.

In a process of its own: here the kernels are made for the interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
CHOICES = (("bfloat16", "128", "7"), ("float16", "128", "7"), ("float32", "64", "3"))
"""What nodes run: 16 bits with the heads of Qwen 2.5, and the default model. `benchmarks aot` does many more."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """A row for each kernel, architecture and choice; what they need of a GPU is shown, whatever comes of it."""
    folder, rows = tmp_path_factory.mktemp("aot"), []
    command = [sys.executable, "-m", "benchmarks", "aot"]
    runs = {
        dtype: subprocess.Popen(
            [*command, "--dtype", dtype, "--head-dim", head_dim, "--group", group, "--json", folder / dtype],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for dtype, head_dim, group in CHOICES
    }  # fmt: skip
    for dtype, run in runs.items():
        output, _ = run.communicate()
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{output}")
        assert (folder / dtype).exists(), output
        rows += [row | {"dtype": dtype} for row in json.loads((folder / dtype).read_text())]
    return rows


@pytest.mark.parametrize("dtype", [dtype for dtype, *_ in CHOICES])
def test_every_kernel_compiles_for_every_architecture(compiled: list[dict[str, Any]], dtype: str) -> None:
    found = {(row["kernel"], row["architecture"]) for row in compiled if row["dtype"] == dtype}
    kernels = {
        *("paged_attention", "merge_splits", "matmul", "add_chunks", "add_rms_norm", "silu_and_mul"),
        *("rotary_and_write_kv", "move_blocks", "filter_tokens", "draw_tokens"),
    }
    assert found == {(kernel, architecture) for kernel in kernels for architecture in (80, 90, 100)}


def test_none_spills_or_needs_more_memory_than_there_is(compiled: list[dict[str, Any]]) -> None:
    assert not [row for row in compiled if row["problem"]]


def test_both_schedules_multiply_with_the_same_instructions(compiled: list[dict[str, Any]]) -> None:
    """What the interpreter cannot show: another instruction would add in another order inside a tile."""
    used = defaultdict(list)
    for row in compiled:
        if row["kernel"] in ("paged_attention", "matmul"):
            used[row["kernel"], row["dtype"], row["architecture"]].append(row["products"])
    for products in used.values():
        assert len(products) > 1
        assert all(one == products[0] for one in products)
    assert all(products[0] for (_, dtype, _), products in used.items() if dtype != "float32")
