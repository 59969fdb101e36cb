"""`kvferry simulate`: how a fleet of a given size would serve a given load."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from dataclasses import asdict

from kvferry.common.errors import ConfigError
from kvferry.services.local.simulate.cluster import Fleet, Simulation
from kvferry.services.local.simulate.policies import POLICIES
from kvferry.services.local.simulate.profile import NodeProfile, load_profile
from kvferry.services.local.simulate.result import Result, measure, plot, table
from kvferry.services.local.simulate.trace import BLOCK_TOKENS, Request, load_trace, synthetic


def simulate(fleet: Fleet, profile: NodeProfile, policy: str, requests: list[Request], seed: int = 0) -> Result:
    largest = max(-(-(request.num_tokens + request.num_output) // BLOCK_TOKENS) for request in requests)
    if largest > fleet.blocks_per_node:
        raise ConfigError(
            f"a request takes {largest} blocks of {BLOCK_TOKENS} tokens, a node has {fleet.blocks_per_node} (--blocks)"
        )
    sim = Simulation(fleet, profile, POLICIES[policy], seed)
    asyncio.run(sim.run(requests))
    span_s = requests[-1].at_s - requests[0].at_s
    return measure(sim, policy, fleet, len(requests) / span_s if span_s else 0.0)


def main(args: argparse.Namespace) -> int:
    """Raises ConfigError for what cannot be simulated."""
    rates = _rates(args)
    profile = load_profile(args.profile).faster(args.speed, args.chunk)
    fleets = [_fleet(text, args) for text in args.nodes.split(",")]
    policies = list(POLICIES) if args.policy == "all" else args.policy.split(",")
    for policy in policies:
        if policy not in POLICIES:
            raise ConfigError(f"no policy {policy!r}: there are {', '.join(POLICIES)}, and all")
    print(f"profile {profile.name}, {args.speed:g} times as fast; {args.trace or args.shape}, {args.requests} requests")
    results = []
    for rate in rates:
        requests = _requests(args, rate)
        results += [simulate(fleet, profile, policy, requests) for fleet in fleets for policy in policies]
    print(table(results))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if args.plot is not None:
        args.plot.write_text(_picture(results, [str(fleet) for fleet in fleets], rates))
    return 0


def _rates(args: argparse.Namespace) -> list[float]:
    """Checks the other numbers, too."""
    for name in ("requests", "speed", "scale", "blocks", "bandwidth"):
        if getattr(args, name) <= 0:
            raise ConfigError(f"--{name} {getattr(args, name)}: must be more than 0")
    try:
        rates = [float(rate) for rate in args.rate.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise ConfigError(f"--rate {args.rate}: one or several numbers above 0, as 0.5,1,2")
    return rates


def _fleet(text: str, args: argparse.Namespace) -> Fleet:
    """`6+10`: prefill and decode nodes; `16`: nodes that do both."""
    if (match := re.fullmatch(r"(\d+)(?:\+(\d+))?", text.strip())) is None or not int(match[2] or match[1]):
        raise ConfigError(f"nodes {text!r}: write 6+10 for prefill and decode nodes, or 16 for nodes that do both")
    first, decode = int(match[1]), match[2]
    options = {"blocks_per_node": args.blocks, "bytes_per_s": args.bandwidth * 1e9, "pulls": args.pulls}
    return Fleet(first, int(decode), **options) if decode is not None else Fleet(0, 0, first, **options)


def _requests(args: argparse.Namespace, rate: float) -> list[Request]:
    if args.trace is not None:
        return load_trace(args.trace, rate=rate, limit=args.requests)
    return synthetic(args.shape, args.requests, rate, args.seed, args.scale)


def _picture(results: list[Result], fleets: list[str], rates: list[float]) -> str:
    """Time to first token over fleets, a line per policy and rate."""
    lines: dict[str, list[float]] = {}
    for result in results:
        name = result.policy if len(rates) == 1 else f"{result.policy}, {result.rate:.1f}/s"
        lines.setdefault(f"{name}, mean", []).append(result.ttft_mean_ms)
        lines.setdefault(f"{name}, p99", []).append(result.ttft_p99_ms)
    return plot("Time to first token, by nodes", fleets, lines, "ms")
