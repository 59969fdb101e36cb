"""Continuous batching against batches that run to completion: our own engine's, and `transformers.generate`'s.

    python -m benchmarks batching [--model M] [--requests 48] [--batch 16] [--rounds 3]

Same model, weights and threads, greedy, lengths in the proportions of ShareGPT, one process. Our tokens must equal
those of the batches that run to completion, and those of transformers for a sample, before any figure is printed.
Output tokens that were asked for count.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.in_process import InProcessEngine, load
from benchmarks.load import random_prompt
from kvferry.common.models import resolve_model

SCALE = 6
"""By how much requests are shorter than ShareGPT's: static batches of the real lengths take hours on a CPU."""


@dataclass(frozen=True)
class Job:
    prompt: tuple[int, ...]
    num_tokens: int


def jobs(count: int, seed: int) -> list[Job]:
    """Log-normal lengths with ShareGPT's means (161 and 338 tokens, as in `benchmarks memory`) divided by SCALE."""
    rng = random.Random(seed)

    def length(mean: float, longest: int) -> int:
        return min(longest, max(2, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0))))

    return [Job(random_prompt(rng, length(161 / SCALE, 200)), length(338 / SCALE, 320)) for _ in range(count)]


def continuous(engine: InProcessEngine, work: list[Job], batch: int) -> list[list[int]]:
    keys = [engine.submit(job.prompt, job.num_tokens) for job in work]
    found = engine.run()
    return [found[key] for key in keys]


def to_completion(engine: InProcessEngine, work: list[Job], batch: int) -> list[list[int]]:
    return [tokens for i in range(0, len(work), batch) for tokens in continuous(engine, work[i : i + batch], batch)]


def static(model: Any, work: list[Job], batch: int) -> list[list[int]]:
    """Padded on the left, every row as long as the longest one."""
    found = []
    for i in range(0, len(work), batch):
        part = work[i : i + batch]
        width = max(len(job.prompt) for job in part)
        ids = torch.tensor([[0] * (width - len(job.prompt)) + list(job.prompt) for job in part])
        mask = torch.tensor([[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in part])
        longest = max(job.num_tokens for job in part)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False
            )
        found += [row[width : width + job.num_tokens].tolist() for row, job in zip(out, part, strict=True)]
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks batching", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    folder = resolve_model(args.model)
    ours = InProcessEngine(load(folder), 700, max_num_seqs=args.batch, prefix_caching=False)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ways: dict[str, Callable[[list[Job]], list[list[int]]]] = {
        "continuous": lambda work: continuous(ours, work, args.batch),
        "to completion": lambda work: to_completion(ours, work, args.batch),
        "transformers, static": lambda work: static(theirs, work, args.batch),
    }
    _check(ways, jobs(6, seed=-1))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(args.rounds):
        work = jobs(args.requests, seed=number)
        asked = sum(job.num_tokens for job in work)
        for name, run in ways.items():
            started = time.perf_counter()
            run(work)
            rates[name].append(asked / (time.perf_counter() - started))
            print(f"round {number}: {name:21} {rates[name][-1]:7.1f} tok/s", flush=True)
    best = statistics.median(rates["continuous"])
    print(f"\n{args.requests} requests, batches of {args.batch}, median of {args.rounds} rounds")
    for name, found in rates.items():
        print(
            f"{name:21} {statistics.median(found):7.1f} tok/s   continuous is {best / statistics.median(found):.2f} x"
        )
    return 0


def _check(ways: dict[str, Callable[[list[Job]], list[list[int]]]], work: list[Job]) -> None:
    found = {name: run(work) for name, run in ways.items()}
    if found["continuous"] != found["to completion"]:
        raise SystemExit("continuous batching gives other tokens than batches to completion: no figures")
    # left padding changes the last bits of transformers' sums, and with them a near tie now and then
    same = sum(a == b for a, b in zip(found["continuous"], found["transformers, static"], strict=True))
    if same < len(work) * 2 // 3:
        raise SystemExit(f"transformers agrees on {same} of {len(work)} requests only: no figures")
    print(f"same tokens; transformers (padded) agrees on {same} of {len(work)} requests\n", flush=True)
