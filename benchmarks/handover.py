"""The hand-over of a prompt from a prefill to an idle decode node: its latency, and how much of the copying is hidden.

    python -m benchmarks handover [--model smollm2-135m] [--prompt-tokens 1000] [--chunk 256] [--requests 21]
                                  [--transports shm]

A whole 1+1 cluster as `kvferry up` starts it, asked over HTTP; figures come from the spans of its own tracing. First
each text has to equal that of the same prompt computed by the decode node alone.

latency: from the last chunk computed to the first decode step begun. hidden: the share of the pulls' time, the last
chunk's pull left out (nothing is left to hide it behind), that passed before the last chunk was computed; beside it
(n-1)/n, the share that could be hidden at best of n chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import random_prompt
from kvferry.services.local.plan import free_ports

Span = dict[str, Any]


@dataclass(frozen=True)
class HandOver:
    """One request's, in milliseconds."""

    latency_ms: float
    confirm_ms: float
    pull_ms: tuple[float, ...]
    hidden: float
    num_chunks: int


@contextmanager
def cluster(model: str, num_nodes: int, *flags: str) -> Iterator[str]:
    """The URL of a running `kvferry up`, once all its nodes are there."""
    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-m", "kvferry.services.local.cli", "up", "--model", model, "--port", str(port), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as up:
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
            while True:
                try:
                    if len(httpx.get(f"{url}/cluster", timeout=2).json()["nodes"]) == num_nodes:
                        break
                except httpx.HTTPError:
                    pass
                if up.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the cluster did not start")
                time.sleep(0.2)
            yield url
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)


def ask(url: str, model: str, prompt: tuple[int, ...]) -> str:
    body = {"model": model, "prompt": list(prompt), "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=300)
    reply.raise_for_status()
    text: str = reply.json()["choices"][0]["text"]
    return text


def hand_over(spans: list[Span]) -> HandOver | None:
    """Of one trace; None for a request without one."""
    of: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: int(span["start_ns"])):
        of[span["name"]].append(span)
    if not of["chunk"] or not of["pull"] or not of["first_step"]:
        return None
    computed_ns = of["chunk"][-1]["end_ns"]
    begun_ns = of["first_step"][0]["start_ns"]
    pulls = of["pull"]
    early = pulls[:-1]
    total = sum(p["end_ns"] - p["start_ns"] for p in early)
    hidden = sum(max(0, min(p["end_ns"], computed_ns) - p["start_ns"]) for p in early)
    return HandOver(
        latency_ms=(begun_ns - computed_ns) / 1e6,
        confirm_ms=sum(s["end_ns"] - s["start_ns"] for s in of["confirm"]) / 1e6,
        pull_ms=tuple((p["end_ns"] - p["start_ns"]) / 1e6 for p in pulls),
        hidden=hidden / total if total else 0.0,
        num_chunks=len(of["chunk"]),
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks handover", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--requests", type=int, default=21)
    parser.add_argument("--transports", default="shm")
    args = parser.parse_args(argv)
    rng = random.Random(0)
    prompts = [random_prompt(rng, args.prompt_tokens) for _ in range(args.requests + 1)]
    common = ("--max-num-batched-tokens", str(args.chunk), "--transports", args.transports)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spans"
        os.environ["OTEL_TRACES_SAMPLER"] = "always_on"
        split = ("--local-prefill-max-tokens", "16", "--otlp-traces-endpoint", f"file:{path}")
        with cluster(args.model, 2, *common, *split) as url:
            texts = [ask(url, args.model, prompt) for prompt in prompts]
        with cluster(args.model, 1, *common, "--num-prefill", "0", "--num-decode", "0", "--num-both", "1") as url:
            if texts[:3] != [ask(url, args.model, prompt) for prompt in prompts[:3]]:
                raise SystemExit("the texts of split and whole differ: no figures")
        traces: defaultdict[str, list[Span]] = defaultdict(list)
        for line in path.read_text().splitlines():
            span = json.loads(line)
            traces[span["trace_id"]].append(span)
    found = [made for spans in traces.values() if (made := hand_over(spans)) is not None]
    found = found[1:]  # the first one shakes hands
    if len(found) < args.requests / 2:  # the router is free to think that the decode node is faster now and then
        raise SystemExit(f"{len(found)} of {args.requests} requests were handed over: no figures")
    report(found, args)
    return 0


def report(found: list[HandOver], args: argparse.Namespace) -> None:
    latencies = sorted(made.latency_ms for made in found)
    chunks = statistics.median(made.num_chunks for made in found)
    pulls = [ms for made in found for ms in made.pull_ms]
    handed_over = f"{len(found)} of {args.requests} prompts of {args.prompt_tokens} tokens"
    print(f"{handed_over} in chunks of {args.chunk}, over {args.transports}")
    print(f"last chunk computed to first decode step begun: median {statistics.median(latencies):.2f} ms "
          f"(min {latencies[0]:.2f}, max {latencies[-1]:.2f})")  # fmt: skip
    print(f"of it, asking whether the lease held: {statistics.median(m.confirm_ms for m in found):.2f} ms; "
          f"one pull: median {statistics.median(pulls):.2f} ms")  # fmt: skip
    print(f"hidden of the pulls before the last: median {statistics.median(m.hidden for m in found):.1%}; "
          f"(n-1)/n of n = {chunks:.0f} chunks: {(chunks - 1) / chunks:.1%}")  # fmt: skip
