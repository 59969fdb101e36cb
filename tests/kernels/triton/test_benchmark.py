"""The kernel benchmark's checks run, hold, and turn red: at a size that the interpreter can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import decode_step, kernel_cases, kernels
from benchmarks.decode_step import step_cases
from benchmarks.kernel_cases import Case, Sizes, cases
from kvferry.kernels.triton import elementwise
from tests.kernels.triton.test_decode_graphs import run_again

SMALL = Sizes(2, 1, 16, 64, 96, 50, 16, num_seqs=2, context=40, chunk=20, num_tokens=33, num_layers=1)


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
        assert "differs" in str(kernels.check(other_bits, torch.float32)), "a graph's bits are those of the eager step"


def test_a_result_of_small_numbers_is_not_taken_for_one_of_zeros() -> None:
    """As attention over thousands of random keys has."""
    want = 0.01 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    for dtype in kernels.TOLERANCE:
        assert kernels.check(Case("right", lambda: want * 1.001, lambda: want), torch.bfloat16) is None
        assert "differs" in str(kernels.check(Case("zeros", lambda: want * 0, lambda: want), dtype))


def test_a_case_that_fails_is_a_problem_like_another() -> None:
    def op() -> torch.Tensor:
        raise RuntimeError("out of resources")

    assert kernels._problem(Case("any", op, op), torch.float32) == "RuntimeError: out of resources"


@pytest.mark.parametrize("wrong_at", [None, 0, 1, 2])
def test_no_speed_is_printed_or_written_when_any_result_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, wrong_at: int | None
) -> None:
    """As on a machine with a GPU: two kernels and a decode step, timed by nobody."""
    ones = torch.ones(3, 4)

    def case(at: int) -> Case:
        return Case(f"case {at}", lambda: ones * (2 if at == wrong_at else 1), lambda: ones, num_bytes=1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(kernel_cases, "cases", lambda *_: iter((case(0), case(1))))
    monkeypatch.setattr(decode_step, "step_cases", lambda *_: iter((case(2),)))
    monkeypatch.setattr(kernels, "_milliseconds", lambda _: 1.0)
    monkeypatch.setattr(kernels, "_ceilings", lambda *_: {"gigabytes_per_s": 1.0, "teraflops": 1.0})
    rc = kernels.main(["--json", str(tmp_path / "speeds")])
    said = capsys.readouterr()
    assert (rc, "GB/s" in said.out, (tmp_path / "speeds").exists()) == (
        (0, True, True) if wrong_at is None else (1, False, False)
    )
    if wrong_at is not None:
        assert said.out == ""
        assert f"case {wrong_at}: differs from the reference by up to 1" in said.err


def test_keys_and_values_that_are_written_wrongly_do_not_pass(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (case,) = (case for case in cases(SMALL, torch.float32, device) if case.name.startswith("rotary_and_write_kv"))
    write = elementwise.rotary_and_write_kv

    def wrong(qkv: torch.Tensor, cos_sin: torch.Tensor, pool: torch.Tensor, *rest: Any) -> torch.Tensor:
        query = write(qkv, cos_sin, pool, *rest)
        pool[:, :, 1] += 1.0
        return query

    assert kernels.check(case, torch.float32) is None
    monkeypatch.setattr(elementwise, "rotary_and_write_kv", wrong)
    assert "differs from the reference" in str(kernels.check(case, torch.float32))


def test_a_row_with_other_bits_alone_does_not_pass() -> None:
    rows = torch.ones(3, 4)
    case = Case("any", lambda: rows, lambda: rows, lambda: rows[:1] * (1 + 1e-6))
    assert "other bits alone" in str(kernels.check(case, torch.float32))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err
