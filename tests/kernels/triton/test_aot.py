"""Every GPU kernel compiles for every architecture, spills nothing, and keeps to one order of sums. Needs no GPU.

In a process of its own: here the kernels are made for the interpreter.
"""

from __future__ import annotations

import json
import re
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


SPOILT = """
import os
os.environ.pop("TRITON_INTERPRET", None)
from dataclasses import replace
from benchmarks import aot as benchmark
from kvferry.kernels.triton import aot
launches = aot.launches
def spoilt(*args):
    found = [one for one in launches(*args) if one.kernel.__name__ == "filter_tokens"]
    return [replace(one, {change}) for one in found]
aot.launches = spoilt
raise SystemExit(benchmark.main(["--arch", "90", "--dtype", "float32", "--head-dim", "64", "--group", "1"]))
"""


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("options=one.options", "1 compiled in .*, 0 with a problem"),
        ("options=one.options | {'maxnreg': 24}", r"spills: \d+ bytes of stack\n1 compiled in .*, 1 with a problem"),
        ("constants=one.constants | {'columns': 3}", "CompilationError"),
    ],
    ids=["as it is", "too few registers", "does not compile"],
)
def test_a_spill_or_a_failed_compile_is_told_and_ends_with_an_error(change: str, says: str) -> None:
    script = SPOILT.replace("{change}", change)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert re.search(says, done.stdout + done.stderr), done.stdout + done.stderr
    assert done.returncode == int("0 with" not in says)


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
