"""The simulator against a real cluster: two prefill and two decode nodes on this machine, the same requests.

    python -m benchmarks simulated [--requests 24] [--rate 0.25] [--model M] [--profile NAME] [--out FILE]

The simulated nodes share this machine's cores, as the real ones do. Prints both and how far they are apart; exits with
1 when time to the first token or between tokens is more than 20 % off in the mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
from pathlib import Path

from benchmarks.load import Call, random_prompt, run_calls
from benchmarks.serving import cluster
from kvferry.services.local.plan import PREFILL_NICENESS
from kvferry.services.local.simulate.cluster import Fleet, Simulation
from kvferry.services.local.simulate.policies import POLICIES
from kvferry.services.local.simulate.profile import load_profile
from kvferry.services.local.simulate.trace import Request

PROMPTS, OUTPUT = (256, 512, 768, 1024), 48
TOLERANCE = 0.2
NICE_WEIGHT = 0.8
"""Of Linux' scheduler: the share of who is one level nicer."""


def calls(count: int, rate: float, seed: int) -> list[Call]:
    rng, at_s, made = random.Random(seed), 0.0, []
    for _ in range(count):
        at_s += rng.expovariate(rate)
        made.append(Call(random_prompt(rng, rng.choice(PROMPTS)), OUTPUT, at_s))
    return made


def simulated(made: list[Call], profile: str) -> tuple[float, float]:
    """Mean milliseconds to the first token, and between tokens."""
    requests = [Request(n, call.due_s or 0.0, len(call.prompt), call.num_tokens, ()) for n, call in enumerate(made)]
    fleet = Fleet(
        2,
        2,
        blocks_per_node=10_000,
        bytes_per_s=6e9,
        cores=os.cpu_count(),
        prefill_weight=NICE_WEIGHT**PREFILL_NICENESS,
    )
    sim = Simulation(fleet, load_profile(profile), POLICIES["kvferry"])
    asyncio.run(sim.run(requests))
    gaps = [gap for node in sim.nodes.values() for gap in node.gaps]
    between = sum(gap * count for gap, count in gaps) / sum(count for _, count in gaps)
    return 1e3 * statistics.mean(served.ttft_s for served in sim.served), 1e3 * between


def real(made: list[Call], model: str, out: Path | None) -> tuple[float, float]:
    with cluster(("--prefill", "2", "--decode", "2"), model) as url:
        warm = [Call(random_prompt(random.Random(n), 512), 8) for n in range(4)]
        asyncio.run(run_calls(url, warm, concurrency=4))
        timings, _ = asyncio.run(run_calls(url, made, concurrency=len(made)))
    if out is not None:
        out.write_text(
            json.dumps([{"tokens": len(c.prompt), "chunks": t.chunks} for c, t in zip(made, timings, strict=True)])
        )
    between = [(t.chunks[-1] - t.chunks[0]) / (t.num_tokens - 1) for t in timings]
    return 1e3 * statistics.mean(t.chunks[0] for t in timings), 1e3 * statistics.mean(between)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks simulated")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rate", type=float, default=0.25)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--profile", default="smollm2-cpu")
    parser.add_argument("--out", type=Path, default=None, help="when each real token came, as JSON")
    args = parser.parse_args(argv)
    made = calls(args.requests, args.rate, seed=7)
    expected, found = simulated(made, args.profile), real(made, args.model, args.out)
    off = [s / r - 1 for s, r in zip(expected, found, strict=True)]
    for name, s, r, by in zip(("TTFT", "ITL"), expected, found, off, strict=True):
        print(f"{name} mean: simulated {s:.0f} ms, real {r:.0f} ms, off by {by:+.0%}")
    return int(max(map(abs, off)) > TOLERANCE)
