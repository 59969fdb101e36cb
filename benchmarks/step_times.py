"""How long the steps of one node take, measured in process, as a profile for `kvferry simulate`.

    python -m benchmarks step_times [--model M] [--threads 1] [--lent-threads 2] [--out FILE]

Prompts are computed chunk by chunk, and batches of 1 to 32 sequences decode at several depths; each step's time is
fitted by least squares of the relative error, and what the fit leaves stays with the profile as its noise.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.in_process import InProcessEngine, load
from benchmarks.load import random_prompt
from kvferry.common.models import resolve_model
from kvferry.services.engine.model import LlamaModel

CHUNK = 256
PROMPT = 2048
NUM_PROMPTS = 3
BATCHES = ((1, 128), (4, 128), (8, 128), (16, 128), (32, 128), (1, 1024), (8, 1024), (16, 1024))
NUM_STEPS = 10
NUM_WARM = 2
"""Steps of each batch that do not count: the first of a size is recorded, to be replayed, which takes a second once."""
TERMS = (
    "step_ms",
    "prompt_token_ms",
    "prompt_million_positions_ms",
    "sequence_ms",
    "sequence_thousand_positions_ms",
)

Sample = tuple[int, int, int, int, float]
"""Prompt tokens, sum of the positions before each of them, sequences that decode, their positions, milliseconds."""


def prompt_samples(engine: InProcessEngine, rng: random.Random) -> list[Sample]:
    samples = []
    for _ in range(NUM_PROMPTS):
        engine.submit(random_prompt(rng, PROMPT), 1)
        for start in range(0, PROMPT, CHUNK):
            took_ms = _step(engine)
            samples.append((CHUNK, CHUNK * start + CHUNK * CHUNK // 2, 0, 0, took_ms))
        engine.run()
    return samples


def decode_samples(engine: InProcessEngine, rng: random.Random) -> list[Sample]:
    samples = []
    for batch, depth in BATCHES:
        prompt = random_prompt(rng, depth)
        engine.submit(prompt, 1)
        engine.run()
        for _ in range(batch):  # found in the cache, but for the last block
            engine.submit(prompt, NUM_WARM + NUM_STEPS + 4)
        while engine.engine.num_waiting_tokens:
            _step(engine)
        for number in range(NUM_WARM + NUM_STEPS):
            took_ms = _step(engine)
            if number >= NUM_WARM:
                samples.append((0, 0, batch, batch * (depth + number), took_ms))
        engine.run()
    return samples


def _step(engine: InProcessEngine) -> float:
    began = time.perf_counter()
    engine.engine.step()
    return 1e3 * (time.perf_counter() - began)


def fit(samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Milliseconds of a step, and per prompt token, per million positions that prompt tokens look at, per sequence that
    decodes, per thousand positions that those look at; and by what factor each step differed from that."""
    rows = np.array([[1.0, p, seen / 1e6, n, kv / 1e3] for p, seen, n, kv, _ in samples])
    took = np.array([ms for *_, ms in samples])
    free, found = list(range(rows.shape[1])), np.zeros(rows.shape[1])
    while True:  # drop what would be negative
        found[:] = 0.0
        found[free] = np.linalg.lstsq(rows[:, free] / took[:, None], np.ones(len(took)), rcond=None)[0]
        if (worst := min(free, key=lambda i: found[i])) is None or found[worst] >= 0:
            break
        free.remove(worst)
    return [float(x) for x in found], [float(x) for x in took / (rows @ found)]


def measure(model: LlamaModel, threads: int) -> dict[str, Any]:
    """With so many threads: what a profile holds of it."""
    torch.set_num_threads(threads)
    rng = random.Random(1)
    engine = InProcessEngine(model, 1024, max_num_seqs=64, chunk=CHUNK)
    prompt_samples(engine, rng)  # warm
    samples = prompt_samples(engine, rng) + decode_samples(engine, rng)
    terms, noise = fit(samples)
    spread = [round(float(x), 3) for x in np.percentile(noise, [5, 50, 95])]
    print(f"{threads} thread(s): fit {[round(t, 4) for t in terms]}, step / fit at 5, 50, 95 %: {spread}")
    return dict(zip(TERMS, terms, strict=True)) | {"noise": [round(x, 3) for x in noise], "samples": samples}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks step_times")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lent-threads", type=int, default=2, help="with idle cores of other nodes; 0: not measured")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    model = load(resolve_model(args.model))
    config = model.config
    common = {
        "kv_bytes_per_token": config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4,
        "max_num_batched_tokens": CHUNK,
    }
    names = {threads: f"{args.model}, {threads} thread(s)" for threads in (args.threads, args.lent_threads) if threads}
    profiles = {threads: {"name": name} | common | measure(model, threads) for threads, name in names.items()}
    profile = profiles[args.threads] | {"lent": profiles.get(args.lent_threads)}
    if args.out is not None:
        args.out.write_text(json.dumps(profile) + "\n")
    return 0
