"""`make test-gpu`, as far as a machine without a GPU can tell: it leaves no test out, and nothing stops the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import gpu


def test_every_test_that_needs_a_gpu_is_in_a_file_that_it_runs() -> None:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    output = subprocess.run(command, cwd=gpu.ROOT, capture_output=True, text=True, check=True).stdout
    collected = {line.partition("::")[0] for line in output.splitlines() if "::" in line}
    assert len(collected) > 5
    assert collected == {str(path.relative_to(gpu.ROOT)) for path in gpu.gpu_test_files()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="finds no NVIDIA GPU"):
        gpu.main(["--first"])


def test_what_hangs_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    done = gpu.run("it", ["hangs"], 2)
    assert (done.status, done.output) == (None, "begun\n")
    assert "TOO LONG" in done.line


def test_nothing_that_fails_keeps_the_rest_from_being_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def run(name: str, arguments: list[str], timeout_s: float, shown: bool = False) -> gpu.Done:
        started.append(arguments[-1])
        return gpu.Done(name, {"float16": None, "--check": 1}.get(arguments[-1], 2), "why it failed", 1.0)

    monkeypatch.setattr(gpu, "machine", lambda: iter(["A GPU"]))
    monkeypatch.setattr(gpu, "run", run)
    files = [str(path.relative_to(gpu.ROOT)) for path in gpu.gpu_test_files()]
    assert gpu.main([]) == 1
    assert started[0] == "--check"
    assert sorted(started[1:-3]) == files
    assert started[-3:] == list(gpu.DTYPES)
    said = capsys.readouterr().out
    assert said.count("why it failed") >= len(files)
    assert f"0 of {len(started)} ok" in said


def test_tests_that_pytest_was_told_not_to_choose_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run", lambda name, *_, shown: gpu.Done(name, 5, "", 1.0))
    assert {done.status for done in gpu.tests(["-k", "none"], 0)} == {0}
    assert {done.status for done in gpu.tests([], 0)} == {5}, "a file without a test for GPUs is not one to be run"
