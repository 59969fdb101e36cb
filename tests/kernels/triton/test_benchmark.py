"""The kernel benchmark's checks run, hold, and turn red: at a size that the interpreter can do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import kernels
from benchmarks.decode_step import step_cases
from benchmarks.kernel_cases import Case, Sizes, cases
from tests.kernels.triton.test_decode_graphs import run_again

SMALL = Sizes(2, 1, 16, 64, 96, 50, 16, num_seqs=2, context=40, chunk=20, num_tokens=3, num_layers=1)


def test_every_case_passes_its_check_and_a_wrong_result_does_not(device: torch.device) -> None:
    for case in cases(SMALL, torch.float32, device):
        assert kernels.check(case, torch.float32) is None, case.name
        for peer in case.peers.values():
            peer()
        wrong = replace(case, op=lambda case=case: case.op() * 0 + 1)
        assert kernels.check(wrong, torch.float32), case.name


def test_decode_steps_pass_it_and_a_wrong_result_does_not(on_gpu: torch.device) -> None:
    capture = None if on_gpu.type == "cuda" else run_again
    for case in step_cases(SMALL, torch.float32, on_gpu, capture):
        assert kernels.check(case, torch.float32) is None, case.name
        wrong = replace(case, op=lambda case=case: case.op() * 0 + 1)
        assert kernels.check(wrong, torch.float32), case.name
        other_bits = replace(case, op=lambda case=case: case.op() * (1 + 1e-6))
        assert "other bits alone" in str(kernels.check(other_bits, torch.float32))


def test_a_row_with_other_bits_alone_does_not_pass() -> None:
    rows = torch.ones(3, 4)
    case = Case("any", lambda: rows, lambda: rows, lambda: rows[:1] * (1 + 1e-6))
    assert "other bits alone" in str(kernels.check(case, torch.float32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
