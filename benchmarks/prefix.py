"""Prefix caching: time to first token of a shared 1,500-token prefix, warm against cold, and its cost without any hit.

    python -m benchmarks prefix [--model M] [--pairs 10] [--zero-hit-pairs 200]

In process, no HTTP. First the warm answer has to equal the cold one. Pairs are interleaved; the interval is the 95 %
bootstrap interval of the median ratio.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from benchmarks.in_process import InProcessEngine, load
from benchmarks.load import random_prompt
from kvferry.common.models import resolve_model
from kvferry.services.engine.model import LlamaModel

PREFIX, SUFFIX = 1500, 16


def first_token_s(engine: InProcessEngine, prompt: tuple[int, ...]) -> tuple[float, list[int]]:
    started = time.perf_counter()
    key = engine.submit(prompt, 1)
    tokens = engine.run()[key]
    return time.perf_counter() - started, tokens


def warm_and_cold(model: LlamaModel, pairs: int) -> tuple[list[float], list[float]]:
    cold, warm = [], []
    plain = InProcessEngine(model, 200, max_num_seqs=8, prefix_caching=False)
    cached = InProcessEngine(model, 400, max_num_seqs=8)
    rng = random.Random(1)
    prefix = random_prompt(rng, PREFIX)
    first_token_s(cached, prefix + random_prompt(rng, SUFFIX))
    for _ in range(pairs):
        prompt = prefix + random_prompt(rng, SUFFIX)
        took, tokens = first_token_s(plain, prompt)
        cold.append(took)
        took, again = first_token_s(cached, prompt)
        warm.append(took)
        if tokens != again:
            raise SystemExit("the warm answer differs from the cold one: no figures")
    return cold, warm


def cost_without_hits(model: LlamaModel, pairs: int) -> list[float]:
    """Time with caching on over time with caching off, for prompts that share nothing.

    Many short pairs: what disturbs the machine for a second then spoils few of them. The pool holds four such prompts,
    so that nearly every block has to be evicted too.
    """
    engines = [InProcessEngine(model, 40, max_num_seqs=8, prefix_caching=on) for on in (True, False)]
    rng, ratios = random.Random(2), []
    for number in range(pairs):
        prompt = random_prompt(rng, 128)
        took = {}
        for on in (0, 1) if number % 2 else (1, 0):
            started = time.perf_counter()
            engines[on].submit(prompt, 8)
            engines[on].run()
            took[on] = time.perf_counter() - started
        ratios.append(took[0] / took[1])
    return ratios


def interval(values: list[float]) -> tuple[float, float]:
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks prefix", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--zero-hit-pairs", type=int, default=200)
    args = parser.parse_args(argv)
    model = load(resolve_model(args.model))
    cold, warm = warm_and_cold(model, max(3, args.pairs // 2))
    ratios = [c / w for c, w in zip(cold, warm, strict=True)]
    print(f"prefix of {PREFIX} tokens: cold {1e3 * statistics.median(cold):.0f} ms, "
          f"warm {1e3 * statistics.median(warm):.0f} ms, {statistics.median(ratios):.1f} x")  # fmt: skip
    ratios = cost_without_hits(model, args.zero_hit_pairs)
    low, high = interval(ratios)
    median = statistics.median(ratios)
    print(f"no hits, {len(ratios)} pairs: time with caching / without {median:.3f}, 95 % in [{low:.3f}, {high:.3f}]")
    return 0
