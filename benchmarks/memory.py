"""KV memory: slots that are allocated but hold no token, paged against contiguous reservation, on one trace.

    python -m benchmarks memory [--requests 400] [--slots 131072]

The trace has ShareGPT's published means (161 prompt and 338 output tokens, the PagedAttention paper, section 6.1) with
log-normal lengths. The real scheduler and block pool run it with a runner that computes nothing; beside it, sequences
get one contiguous piece each, as long as the context, the power of two above their final length, or exactly that.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.common.hashing import root_name
from kvferry.common.requests import SamplingParams
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.sampler import SampledToken
from kvferry.services.engine.schedule import Schedule
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence

MEAN_PROMPT, MEAN_OUTPUT, SIGMA = 161.31, 337.99, 1.0
CONTEXT = 2048
BLOCK = 16


@dataclass(frozen=True)
class Request:
    num_prompt: int
    num_output: int

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output


@dataclass(frozen=True)
class Usage:
    """Share of allocated slots without a token, and sequences running, averaged over steps with a full pool."""

    waste: float
    num_running: float
    num_steps: int


def trace(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)

    def length(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - SIGMA**2 / 2, SIGMA)))

    found = [Request(length(MEAN_PROMPT), length(MEAN_OUTPUT)) for _ in range(count * 2)]
    return [r for r in found if r.num_tokens <= CONTEXT][:count]


class _NoCompute:
    def execute(self, schedule: Schedule) -> list[SampledToken]:
        return [SampledToken(3) for row in schedule.rows if row.samples]


def paged(requests: list[Request], num_slots: int) -> Usage:
    """The product's own scheduler and pool."""
    reports: list[StepReport] = []
    scheduler = Scheduler(BlockPool(num_slots // BLOCK, enable_prefix_caching=False), _limits(len(requests)))
    engine = Engine(_NoCompute(), scheduler, (), CONTEXT, reports.append)
    for number, r in enumerate(requests):
        params = SamplingParams(max_tokens=r.num_output, ignore_eos=True)
        tokens = [5] * r.num_prompt
        engine.submit(Sequence(str(number), tokens, r.num_prompt, root_name("m", str(number)), BLOCK, params))
    wastes, runnings = [], []
    while engine.step():
        allocated = engine.load().accounts.sequence * BLOCK
        if scheduler.waiting and allocated:
            wastes.append(1 - sum(seq.num_computed_tokens for seq in scheduler.running) / allocated)
            runnings.append(len(scheduler.running))
    return Usage(statistics.fmean(wastes), statistics.fmean(runnings), len(wastes))


def _limits(count: int) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs=count, max_num_batched_tokens=2048, max_num_waiting=count)


def contiguous(requests: list[Request], num_slots: int, reserve: Callable[[Request], int]) -> Usage:
    """One piece of memory for each sequence from start to end; no fragmentation between pieces is counted."""
    waiting, running = list(reversed(requests)), list[list[int]]()  # [filled, final, reserved]
    wastes, runnings = [], []
    while waiting or running:
        while waiting and sum(r[2] for r in running) + reserve(waiting[-1]) <= num_slots:
            r = waiting.pop()
            running.append([r.num_prompt, r.num_tokens, reserve(r)])
        if waiting:
            wastes.append(1 - sum(r[0] for r in running) / sum(r[2] for r in running))
            runnings.append(len(running))
        for r in running:
            r[0] += 1
        running = [r for r in running if r[0] < r[1]]
    return Usage(statistics.fmean(wastes), statistics.fmean(runnings), len(wastes))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--slots", type=int, default=32768, help="KV slots in the pool")
    args = parser.parse_args(argv)
    requests = trace(args.requests)
    rows = {
        "paged (kvferry)": paged(requests, args.slots),
        f"contiguous, context {CONTEXT}": contiguous(requests, args.slots, lambda _: CONTEXT),
        "contiguous, power of two": contiguous(requests, args.slots, lambda r: 2 ** math.ceil(math.log2(r.num_tokens))),
        "contiguous, exact (oracle)": contiguous(requests, args.slots, lambda r: r.num_tokens),
    }
    print(f"{len(requests)} requests, {args.slots} KV slots, blocks of {BLOCK}\n")
    print(f"{'':28} {'waste':>7} {'sequences':>10} {'full steps':>11}")
    for name, usage in rows.items():
        print(f"{name:28} {usage.waste:7.1%} {usage.num_running:10.1f} {usage.num_steps:11}")
    return 0
