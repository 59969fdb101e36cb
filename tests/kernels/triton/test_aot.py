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
CHOICES = (("bfloat16", "128", "7"), ("float32", "64", "3"))
"""What nodes run: 16 bits with the heads of Qwen 2.5, and the default model. `benchmarks aot` does many more."""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    rows = []
    for dtype, head_dim, group in CHOICES:
        path = tmp_path_factory.mktemp("aot") / "resources.json"
        options = ["--dtype", dtype, "--head-dim", head_dim, "--group", group, "--json", path]
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks", "aot", *options], cwd=ROOT, capture_output=True, text=True
        )
        assert path.exists(), run.stderr
        rows += json.loads(path.read_text())
    return rows


def test_every_kernel_compiles_for_every_architecture(compiled: list[dict[str, Any]]) -> None:
    found = {(row["kernel"], row["architecture"]) for row in compiled}
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
            dtype = row["variant"].split(",")[0]
            used[row["kernel"], dtype, row["architecture"]].append(row["products"])
    for products in used.values():
        assert len(products) > 1
        assert all(one == products[0] for one in products)
    assert all(products[0] for (_, dtype, _), products in used.items() if dtype == "bf16")
