"""Everything that needs an NVIDIA GPU, what matters most first: `make test-gpu`, or `python -m tests.gpu` where kvferry
and its extras `worker` and `dev` are installed.

    python -m tests.gpu                all of it
    python -m tests.gpu -k attention   the tests that pytest chooses so, then the rest
    python -m tests.gpu --first        only the machine, and each kernel and a decode step at real sizes

A GPU is seldom at hand for long. So the first lines say whether captured decode steps and kernels are right; test files
run side by side, each in a process of its own (a kernel that reads where it must not ends what its process does on the
GPU, not the others'), each part has a deadline, all of them one, and nothing that fails keeps the rest from being run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
ALL_S, FIRST_S, FILE_S, BENCHMARK_S = 480, 120, 180, 90
MAX_FILES_AT_ONCE = 6
DTYPES = ("bfloat16", "float16", "float32")
_MARKED = re.compile(r"\bmark\.gpu\b|\bdevice: torch\.device\b|\bon_gpu\b")


@dataclass(frozen=True)
class Done:
    name: str
    status: int | None  # None: stopped at its deadline
    output: str
    seconds: float

    @property
    def line(self) -> str:
        state = {0: "ok", None: "TOO LONG"}.get(self.status, f"FAILED ({self.status})")
        last = self.output.strip().rpartition("\n")[2].strip("= ")
        return f"{state:11} {self.seconds:4.0f} s  {self.name}: {last}"


def gpu_test_files() -> list[Path]:
    """Every file with a test that is marked `gpu`."""
    return [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _MARKED.search(path.read_text())]


def machine() -> Iterator[str]:
    """What it is, and what Triton lacks on it. Raises SystemExit without a GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no NVIDIA GPU here")
    import triton

    gpu = torch.cuda.get_device_properties(0)
    yield (
        f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB; torch {torch.__version__} "
        f"(CUDA {torch.version.cuda}), triton {triton.__version__}, Python {sys.version.split()[0]}"
    )
    if not any(map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))):
        yield "LACKING: a C compiler, with which Triton builds what starts its kernels"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        yield "LACKING: Python.h (Debian: python3-dev), which that needs"


def run(name: str, arguments: Sequence[str], timeout_s: float, *, shown: bool = False) -> Done:
    """`python -m` with these, stopped with all its children at the deadline. `shown`: output goes out as it comes."""
    started = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        stdout=None if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    status: int | None = None
    output = ""
    try:
        output, _ = process.communicate(timeout=timeout_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
    return Done(name, status, output or "", time.monotonic() - started)


def _run_until(deadline_s: float, name: str, arguments: Sequence[str], timeout_s: float, shown: bool = False) -> Done:
    return run(name, arguments, max(1.0, min(timeout_s, deadline_s - time.monotonic())), shown=shown)


def tests(pytest_arguments: Sequence[str], deadline_s: float) -> Iterator[Done]:
    """A result for each file, in the order in which they end. `deadline_s`: by `time.monotonic`."""
    options = ("pytest", "-m", "gpu", "-q", "-rfE", "-p", "no:cacheprovider", *pytest_arguments)
    num_at_once = max(1, min(MAX_FILES_AT_ONCE, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(num_at_once) as pool:
        names = [str(path.relative_to(ROOT)) for path in gpu_test_files()]
        runs = [pool.submit(_run_until, deadline_s, name, (*options, name), FILE_S) for name in names]
        for one in as_completed(runs):
            done = one.result()
            nothing_chosen = done.status == 5 and bool(pytest_arguments)
            yield Done(done.name, 0, done.output, done.seconds) if nothing_chosen else done


def main(arguments: Sequence[str]) -> int:
    started = time.monotonic()
    deadline_s = started + ALL_S
    for line in machine():
        print(line, flush=True)
    found = [run("kernels and decode steps", ("benchmarks", "kernels", "--check"), FIRST_S, shown=True)]
    print(f"{found[0].line}\n", flush=True)
    if "--first" not in arguments:
        for done in tests(arguments, deadline_s):
            print(done.line, flush=True)
            if done.status != 0:
                print(done.output[-6000:], flush=True)
            found.append(done)
        for dtype in DTYPES:  # alone: what else runs would be in their times
            print(flush=True)
            benchmark = ("benchmarks", "kernels", "--dtype", dtype)
            found.append(_run_until(deadline_s, f"benchmarks in {dtype}", benchmark, BENCHMARK_S, shown=True))
    bad = [done for done in found if done.status != 0]
    print(f"\n{len(found) - len(bad)} of {len(found)} ok in {time.monotonic() - started:.0f} s", flush=True)
    for done in bad:
        print(done.line)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
