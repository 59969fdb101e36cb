"""Compiles every GPU kernel for each architecture, without a GPU: registers, shared memory. Red where one spills.

`python -m benchmarks aot [--arch 90] [--dtype bfloat16] [--head-dim 128] [--group 4] [--json FILE]`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path


def main(argv: Sequence[str] = ()) -> int:
    if find_spec("triton") is None:
        print("triton is not installed here: nothing to compile", file=sys.stderr)
        return 2
    os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported
    import torch

    from kvferry.kernels.triton import aot

    parser = argparse.ArgumentParser(prog="benchmarks aot", description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", choices=aot.ARCHITECTURES, default=aot.ARCHITECTURES)
    names = [str(dtype).removeprefix("torch.") for dtype in aot.DTYPES]
    parser.add_argument("--dtype", nargs="+", choices=names, default=names)
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument(
        "--group", type=int, nargs="+", default=[1, 3, 4, 7, 8], help="query heads that share a kv head"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    started = time.monotonic()
    dtypes = [getattr(torch, name) for name in args.dtype]
    rows = list(aot.compile_all(args.arch, dtypes, args.head_dim, args.group))
    print(aot.table(rows))
    problems = [row for row in rows if row.problem]
    print(f"{len(rows)} compiled in {time.monotonic() - started:.0f} s, {len(problems)} with a problem")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) | {"problem": row.problem} for row in rows], indent=1))
    return 1 if problems else 0
