"""Attention of CPU nodes over KV blocks of float32 and of 16 bits, at several depths; one layer after the other.

    python -m benchmarks attention [--layers 30] [--rounds 7] [--threads 1,2] [--chunk 256]

The shapes are SmolLM2-135M's, all blocks of a pool lie scattered, and the dtypes take turns within each round. Before
anything is timed, a result over 16 bits must equal, bit for bit, that over a float32 pool of the same numbers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvferry.kernels import ops

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK = 9, 3, 64, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DECODES = ((1, 300), (1, 2000), (8, 300), (8, 2000), (32, 300), (32, 2000))
CHUNKS = (0, 1792)


@dataclass(frozen=True)
class Work:
    """A step: so many sequences, each with `context` positions computed and `num_new` to compute."""

    num_seqs: int
    context: int
    num_new: int = 1

    @property
    def num_blocks(self) -> int:
        return self.num_seqs * -(-(self.context + self.num_new) // BLOCK)


def attend(work: Work, kv_cache: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The step's attention, through all layers of the pool's first blocks -> the last layer's result."""
    order = torch.randperm(work.num_blocks, generator=torch.Generator().manual_seed(1))
    starts = range(0, work.num_seqs * work.num_new + 1, work.num_new)
    query = torch.randn(starts[-1], NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2))
    plan = ops.plan_attention(kv_cache, order.view(work.num_seqs, -1), starts, [work.context] * work.num_seqs)

    def run() -> torch.Tensor:
        for layer in range(kv_cache.shape[1]):
            out = ops.paged_attention(query, kv_cache, layer, plan, HEAD_DIM**-0.5)
        return out

    return run


def measure(work: Work, pools: Sequence[torch.Tensor], rounds: int) -> list[float]:
    """Milliseconds of the fastest round, per dtype."""
    runs = [attend(work, pool) for pool in pools]
    took: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        for run, found in zip(runs, took, strict=True):
            began = time.perf_counter()
            run()
            if number > 0:
                found.append(1e3 * (time.perf_counter() - began))
    return [min(found) for found in took]


def check() -> None:
    work = Work(3, 200, 40)
    for dtype in DTYPES[1:]:
        pool = torch.randn(work.num_blocks, 1, 2, NUM_KV_HEADS, BLOCK, HEAD_DIM).to(dtype)
        if not torch.equal(attend(work, pool)(), attend(work, pool.float())()):
            raise SystemExit(f"attention over {dtype} has other bits than over the same numbers in float32: no figures")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks attention", description=__doc__)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--chunk", type=int, default=256)
    args = parser.parse_args(argv)
    check()
    works = [Work(*decode) for decode in DECODES] + [Work(1, context, args.chunk) for context in CHUNKS]
    most = max(work.num_blocks for work in works)
    pool = torch.randn(most, args.layers, 2, NUM_KV_HEADS, BLOCK, HEAD_DIM)
    pools = [pool.to(dtype) for dtype in DTYPES]
    for num_threads in map(int, args.threads.split(",")):
        torch.set_num_threads(num_threads)
        for work in works:
            wide, *narrow = measure(work, pools, args.rounds)
            others = ", ".join(f"{ms:.2f} ({wide / ms:.2f} x)" for ms in narrow)
            names = "float32, bfloat16, float16"
            print(
                f"{num_threads} threads, {work.num_seqs:2} x {work.num_new:3} tokens after {work.context:4}: {names} "
                f"{wide:.2f}, {others} ms",
                flush=True,
            )
    return 0
