"""GPU kernels against the machine's own ceilings and their peers. Says nothing of speed while a result is wrong.

`python -m benchmarks kernels [--dtype bfloat16] [--check] [--json FILE]`. Ceilings are measured here: the bandwidth of
a copy in memory, the rate of torch's product of large matrices. Whole decode steps as a CUDA graph and without, then
kernels. All are checked, whichever is wrong or fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import torch

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def main(argv: Sequence[str] = ()) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks kernels", description=__doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--check", action="store_true", help="only whether results are right, a line as each is known")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or find_spec("triton") is None:
        print("no NVIDIA GPU (or no triton) here: GPU kernels are not measured", file=sys.stderr)
        return 2
    from benchmarks.decode_step import step_cases
    from benchmarks.kernel_cases import Sizes, cases

    dtype, device = getattr(torch, args.dtype), torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    rows, num_wrong = [], 0
    for case in chain(step_cases(Sizes(), dtype, device), cases(Sizes(), dtype, device)):
        if problem := _problem(case, dtype):
            print(f"WRONG {case.name}: {problem}; no speed is reported", file=sys.stderr, flush=True)
            num_wrong += 1
        elif args.check:
            print(f"ok    {case.name}", flush=True)
        elif not num_wrong:
            rows.append(_measure(case))
    if not args.check and not num_wrong:
        ceilings = _ceilings(dtype, device)
        print(_table(torch.cuda.get_device_name(device), args.dtype, ceilings, rows))
        if args.json:
            args.json.write_text(json.dumps({"ceilings": ceilings, "kernels": rows}, indent=1))
    return 1 if num_wrong else 0


def _problem(case: Any, dtype: torch.dtype) -> str | None:
    try:
        return check(case, dtype)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"


def check(case: Any, dtype: torch.dtype) -> str | None:
    """What is wrong with the case's result, or with what it has written, if anything."""
    got, want = case.op(), case.truth()
    tolerance = 0.0 if case.is_exact else TOLERANCE[dtype]
    if problem := _difference(got, want, tolerance):
        return problem
    if case.written is not None and (problem := _difference(*case.written, tolerance)):
        return f"what it writes {problem}"
    if case.one_row is not None and not torch.equal(case.one_row()[0], got[0]):
        return "its first row has other bits alone than in company"
    return None


def _difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str | None:
    """The tolerance is a part of what the result's numbers mostly are: attention over thousands of random keys has
    results so small that zeros would be near them."""
    if not got.is_floating_point():
        return None if torch.equal(got, want) else "is another choice than the reference's"
    wanted = want.float()
    error = (got.float() - wanted).abs()
    if not bool((error <= tolerance * (wanted.abs() + wanted.square().mean().sqrt())).all()):
        return f"differs from the reference by up to {error.max().item():.2g}"
    return None


def _measure(case: Any) -> dict[str, Any]:
    times = {"kvferry": _milliseconds(case.op)}
    for name, op in case.peers.items():
        try:
            times[name] = _milliseconds(op)
        except Exception as exc:
            print(f"{case.name}: {name} failed: {exc!r}", file=sys.stderr)
    return {
        "name": case.name,
        "milliseconds": times,
        "gigabytes_per_s": {name: case.num_bytes / ms / 1e6 for name, ms in times.items()},
        "teraflops": {name: case.num_operations / ms / 1e9 for name, ms in times.items()},
    }


def _milliseconds(op: Any) -> float:
    """The median, with a cold second-level cache."""
    from triton.testing import do_bench

    return float(do_bench(op, return_mode="median"))


def _ceilings(dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left = torch.randn(8192, 8192, dtype=dtype, device=device)
    return {
        "gigabytes_per_s": 2 * source.nbytes / _milliseconds(lambda: target.copy_(source)) / 1e6,
        "teraflops": 2 * 8192**3 / _milliseconds(lambda: left @ left) / 1e9,
    }


def _table(name: str, dtype: str, ceilings: dict[str, float], rows: Sequence[dict[str, Any]]) -> str:
    bandwidth, rate = ceilings["gigabytes_per_s"], ceilings["teraflops"]
    lines = [
        f"{name}, {dtype}; a copy moves {bandwidth:.0f} GB/s, torch multiplies at {rate:.0f} TFLOP/s",
        f"\n{'kernel':48} {'by':15} {'ms':>9} {'GB/s':>7} {'of copy':>8} {'TFLOP/s':>8} {'of torch':>8}",
    ]
    for row in rows:
        for by, ms in row["milliseconds"].items():
            moved, done = row["gigabytes_per_s"][by], row["teraflops"][by]
            operations = f"{done:8.1f} {done / rate:8.0%}" if done else ""
            title = row["name"] if by == "kvferry" else ""
            lines.append(f"{title:48} {by:15} {ms:9.4f} {moved:7.0f} {moved / bandwidth:8.0%} {operations}".rstrip())
    return "\n".join(lines)
