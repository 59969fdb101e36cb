"""A load generator: streams completions over HTTP and times every token. Prompts are seeded random token ids."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass(frozen=True)
class Call:
    """One request. `due_s`: when to send it, in seconds after the start; None: as soon as there is a seat."""

    prompt: tuple[int, ...]
    num_tokens: int
    due_s: float | None = None


@dataclass
class Timing:
    """Seconds. `chunks`: when each piece of text came, after the request was due."""

    chunks: list[float] = field(default_factory=list)
    num_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""


def random_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(1000, 40000), k=length))


async def send(session: aiohttp.ClientSession, url: str, call: Call) -> Timing:
    """Streams one greedy completion past its end of sequence. Raises on anything but a complete answer."""
    timing, started = Timing(), time.perf_counter()
    body = {
        "model": "bench",
        "prompt": list(call.prompt),
        "max_tokens": call.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"HTTP {reply.status}: {await reply.text()}")
        async for line in reply.content:
            if line.startswith(b"data: {"):
                _take(json.loads(line[6:]), timing, time.perf_counter() - started)
    if timing.num_tokens != call.num_tokens:
        raise RuntimeError(f"asked for {call.num_tokens} tokens, got {timing.num_tokens}")
    return timing


def _take(event: dict[str, Any], timing: Timing, now_s: float) -> None:
    if "error" in event:
        raise RuntimeError(str(event["error"]))
    for choice in event["choices"]:
        if choice["text"]:
            timing.chunks.append(now_s)
            timing.text += choice["text"]
    if usage := event.get("usage"):
        timing.num_tokens = usage["completion_tokens"]
        timing.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]


async def run_calls(url: str, calls: Sequence[Call], concurrency: int) -> tuple[list[Timing], float]:
    """All calls, at most `concurrency` at once (those that are due at a time are sent then); timings and seconds."""
    seats, begun = asyncio.Semaphore(concurrency), time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(call: Call) -> Timing:
            if call.due_s is not None:
                await asyncio.sleep(max(0.0, begun + call.due_s - time.perf_counter()))
                return await send(session, url, call)
            async with seats:
                return await send(session, url, call)

        timings = list(await asyncio.gather(*map(one, calls)))
    return timings, time.perf_counter() - begun


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(timings: Sequence[Timing], wall_s: float) -> dict[str, float]:
    """Output tokens per second; time to first token and inter-token latency in milliseconds."""
    gaps = [b - a for t in timings for a, b in zip(t.chunks, t.chunks[1:], strict=False)] or [0.0]
    ttft = [t.chunks[0] for t in timings if t.chunks]
    return {
        "output_tok_s": sum(t.num_tokens for t in timings) / wall_s,
        "ttft_p50_ms": 1e3 * statistics.median(ttft),
        "ttft_max_ms": 1e3 * max(ttft),
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * quantile(gaps, 0.99),
        "itl_max_ms": 1e3 * max(gaps),
    }
