"""Serving, end to end: a `both` node against one prefill and one decode node, same machine, same cores, in one run.

    python -m benchmarks serving [--model M] [--cells single,c8] [--rounds 3] [--out FILE]

The two clusters first have to give the same text for the same prompts; no figure is printed before. Rounds alternate
between them, and medians are reported.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.load import Call, random_prompt, run_calls, summary

CLUSTERS = {"both": ("--prefill", "0", "--decode", "0", "--both", "1"), "1+1": ("--prefill", "1", "--decode", "1")}


@dataclass(frozen=True)
class Cell:
    """A workload: `count` requests, `concurrency` at once or at `rate` per second."""

    count: int
    prompt: tuple[int, ...]
    output: int
    concurrency: int = 1
    rate: float | None = None

    def calls(self, seed: str) -> list[Call]:
        rng, at, calls = random.Random(seed), 0.0, []
        for _ in range(self.count):
            due = at if self.rate else None
            calls.append(Call(random_prompt(rng, rng.choice(self.prompt)), self.output, due))
            at += rng.expovariate(self.rate) if self.rate else 0.0
        return calls


CELLS = {
    "single": Cell(2, (16,), 128),
    "prefill": Cell(5, (512,), 1),
    "c8": Cell(24, (128,), 64, concurrency=8),
    "c32": Cell(64, (128,), 64, concurrency=32),
    "poisson": Cell(12, (128, 128, 128, 512), 64, rate=0.5),
}


@contextlib.contextmanager
def cluster(flags: tuple[str, ...], model: str) -> Iterator[str]:
    """`kvferry up` on a free port, its URL once ready."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "kvferry.services.local.cli", "up", *flags, "--model", model]
    command += ["--served-model-name", "bench", "--port", str(port)]
    with tempfile.TemporaryFile() as said:  # a pipe that nobody reads stops who writes to it
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        try:
            _wait_ready(process, said, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _wait_ready(process: subprocess.Popen[bytes], said: IO[bytes], url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if process.poll() is not None:
            said.seek(0)
            raise SystemExit(f"kvferry up ended with {process.returncode}: {said.read()!r}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/ready", timeout=1):
            return
        time.sleep(0.2)
    raise SystemExit("the cluster was not ready within 120 s")


def check_same_text(urls: dict[str, str]) -> None:
    """Exits when the clusters do not agree: speed means nothing then."""
    calls = [Call(random_prompt(random.Random(length), length), 24) for length in (5, 16, 100, 300)]
    texts = {name: [t.text for t in asyncio.run(run_calls(url, calls, 4))[0]] for name, url in urls.items()}
    if len({tuple(t) for t in texts.values()}) != 1:
        raise SystemExit(f"different text from the clusters, no figures: {texts}")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks serving", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    results: dict[str, dict[str, dict[str, float]]] = {}
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(cluster(flags, args.model)) for name, flags in CLUSTERS.items()}
        check_same_text(urls)
        print("same text from both clusters\n")
        for cell in args.cells.split(","):
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in urls}
            for number in range(args.rounds):
                for name, url in urls.items():
                    calls = CELLS[cell].calls(f"{cell}/{number}")
                    rounds[name].append(summary(*asyncio.run(run_calls(url, calls, CELLS[cell].concurrency))))
            results[cell] = {name: _medians(found) for name, found in rounds.items()}
            _print(cell, results[cell])
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(r[key] for r in rounds), 1) for key in rounds[0]}


def _print(cell: str, by_cluster: dict[str, dict[str, float]]) -> None:
    for name, row in by_cluster.items():
        print(f"{cell:8} {name:5} " + "  ".join(f"{key} {value:8.1f}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
