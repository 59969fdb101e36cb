"""Five ways to place requests, on the same simulated fleets: random, round robin, least loaded, prefix only, and ours.

    python -m benchmarks routing [--nodes 4,16,64,256] [--shapes mooncake,hot,burst,chat] [--seeds N] [--policies all]
                                 [--out FILE] [--plots FOLDER]

The load has the shape of Mooncake's published trace, and an adversarial one with a hot prefix; router and index are the
real ones, nodes are measured step times with noise (`services/local/simulate`). A quarter of the nodes decode. All
policies pull cached blocks, and those that look at load know what they have sent since the last report: what differs is
the choice alone (a chunk's noise is the same whoever computes it). Exits with 1 where ours has not the best mean and
p99 time to the first token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kvferry.services.local.simulate.cluster import Fleet
from kvferry.services.local.simulate.command import simulate
from kvferry.services.local.simulate.policies import POLICIES
from kvferry.services.local.simulate.profile import load_profile
from kvferry.services.local.simulate.result import Result, mean_of, plot, table
from kvferry.services.local.simulate.trace import SHAPES, synthetic

SPEED, CHUNK = 40.0, 2048
"""One CPU core, 40 times faster: a prompt of 12,000 tokens takes about three seconds."""
RATE = {"mooncake": 0.055, "hot": 0.225, "burst": 0.05, "chat": 1.2}
"""Requests per second and node: prefill nodes are busy about a quarter of the time, in chat decode nodes mostly."""
REQUESTS = {4: 500, 16: 800, 64: 1200, 256: 1600}
SEEDS = {4: 3, 16: 2, 64: 2}


def compare(shape: str, num_nodes: int, num_seeds: int, policies: Sequence[str]) -> dict[str, list[Result]]:
    """By policy, a result for each seed."""
    profile = load_profile().faster(SPEED, CHUNK)
    fleet = Fleet(num_nodes - num_nodes // 4, num_nodes // 4)
    count = REQUESTS.get(num_nodes, 1000)
    loads = [synthetic(shape, count, RATE[shape] * num_nodes, seed) for seed in range(num_seeds)]
    return {
        policy: [simulate(fleet, profile, policy, load, seed) for seed, load in enumerate(loads)] for policy in policies
    }


def spread(found: dict[str, list[Result]]) -> str:
    """Ours over the best other one's, for each seed."""
    ours, others = found["kvferry"], [results for policy, results in found.items() if policy != "kvferry"]
    told = []
    for name in ("ttft_mean_ms", "ttft_p99_ms") if others else ():
        ratios = [
            getattr(one, name) / min(getattr(other, name) for other in same)
            for one, *same in zip(ours, *others, strict=True)
        ]
        told.append(f"{name.split('_')[1]} {' '.join(f'{ratio:.3f}' for ratio in ratios)}")
    return ", ".join(told)


def is_ours_best(results: list[Result]) -> bool:
    ours = next(r for r in results if r.policy == "kvferry")
    others = [r for r in results if r is not ours]
    return all(ours.ttft_mean_ms <= r.ttft_mean_ms and ours.ttft_p99_ms <= r.ttft_p99_ms for r in others)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks routing")
    parser.add_argument("--nodes", default="4,16,64,256")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plots", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=0, help="loads for each cell (default: 3 to 1, by size)")
    parser.add_argument("--policies", default="all")
    args = parser.parse_args(argv)
    policies = list(POLICIES) if args.policies == "all" else args.policies.split(",")
    sizes = [int(size) for size in args.nodes.split(",")]
    found: dict[str, list[Result]] = {}
    all_best = True
    for shape in args.shapes.split(","):
        results = found[shape] = []
        for num_nodes in sizes:
            began = time.monotonic()
            by_seed = compare(shape, num_nodes, args.seeds or SEEDS.get(num_nodes, 1), policies)
            group = [mean_of(results_of) for results_of in by_seed.values()]
            best = is_ours_best(group)
            all_best = all_best and best
            print(f"\n{shape}, {num_nodes} nodes ({time.monotonic() - began:.0f} s): ours best: {best}\n{table(group)}")
            print(f"ours over the best other, each seed: {spread(by_seed)}", flush=True)
            results += group
        if args.plots is not None:
            for figure in ("mean", "p99"):
                lines = {
                    policy: [getattr(r, f"ttft_{figure}_ms") for r in results if r.policy == policy]
                    for policy in policies
                }
                title = f"Time to first token, {figure}: {shape}"
                (args.plots / f"routing-{shape}-{figure}.svg").write_text(plot(title, [*map(str, sizes)], lines, "ms"))
    if args.out is not None:
        args.out.write_text(json.dumps({shape: [asdict(r) for r in rs] for shape, rs in found.items()}, indent=1))
    return int(not all_best)
