"""What clients ask, and when: traces from a file, and synthetic ones.

The shape is that of Mooncake's published conversation trace (Qin et al., "Mooncake: Trading More Storage for Less
Computation", FAST '25, table 2; github.com/kvcache-ai/Mooncake): 12,035 input tokens and 343 output tokens in the mean,
40 % of all blocks of 512 tokens seen before, few prefixes that very many requests share. Files have its form, a line
per request: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [ids of the prompt's blocks]}.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvferry.common.errors import ConfigError

BLOCK_TOKENS = 512
MEAN_INPUT, MEAN_OUTPUT = 12_035, 343
SHAPES = ("mooncake", "hot", "burst", "chat")
Shape = Literal["mooncake", "hot", "burst", "chat"]


@dataclass(frozen=True, slots=True)
class Request:
    """`blocks`: names of the prompt's full blocks; equal names mean equal prefixes. `at_s`: when it arrives."""

    number: int
    at_s: float
    num_tokens: int
    num_output: int
    blocks: tuple[bytes, ...]


def synthetic(shape: Shape, count: int, rate: float, seed: int = 0, scale: float = 1.0) -> list[Request]:
    """`count` requests at `rate` per second (Poisson). `scale` shrinks all prompts, for slow machines.

    mooncake  conversations that go on, behind system prompts with a skewed (Zipf) popularity
    hot       adversarial: nine in ten begin with one same prefix of 8,192 tokens, from one instant on
    burst     mooncake's requests, arriving in bursts of 32 at one instant
    chat      short turns, 2,000 tokens in and 250 out, most of them seen before
    """
    rng = random.Random(f"{seed}/{shape}/{count}")
    make = {"mooncake": _mooncake, "hot": _hot, "burst": _mooncake, "chat": _chat}[shape]
    requests, at_s = [], 0.0
    for number, (tokens, output, blocks) in zip(range(count), make(rng), strict=False):
        at_s += rng.expovariate(rate) if shape != "burst" else (number % 32 == 0) * rng.expovariate(rate / 32)
        requests.append(Request(number, at_s, max(int(tokens * scale), 1), output, blocks))
    if scale == 1.0:
        return requests
    return [replace(r, blocks=r.blocks[: r.num_tokens // BLOCK_TOKENS]) for r in requests]


_Made = tuple[int, int, tuple[bytes, ...]]


class _Names:
    """Fresh block names, and prefixes that are drawn again and again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next = 0

    def fresh(self, count: int) -> tuple[bytes, ...]:
        first, self._next = self._next, self._next + count
        return tuple(n.to_bytes(16, "big") for n in range(first, first + count))


def _lognormal(rng: random.Random, mean: float, sigma: float, least: int, most: int) -> int:
    return min(most, max(least, round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))))


def _zipf(rng: random.Random, count: int) -> int:
    return min(int(count ** rng.random()) - 1, count - 1)


def _conversations(
    rng: random.Random, *, opening: float, turn: float, output: float, go_on: float, prefixes: int
) -> Iterator[_Made]:
    names = _Names(rng)
    systems = [names.fresh(rng.randrange(1, 6)) for _ in range(prefixes)]
    live: list[tuple[int, tuple[bytes, ...]]] = []
    while True:
        if live and rng.random() < go_on:
            tokens, blocks = live.pop(max(len(live) - 1 - int(rng.expovariate(1 / 40)), 0))
            tokens += _lognormal(rng, turn, 1.0, 32, 60_000)
        else:
            blocks = systems[_zipf(rng, prefixes)]
            tokens = len(blocks) * BLOCK_TOKENS + _lognormal(rng, opening, 1.1, 64, 120_000)
        tokens = min(tokens, 125_000)
        blocks += names.fresh(max(tokens // BLOCK_TOKENS - len(blocks), 0))
        live.append((tokens, blocks))
        yield tokens, _lognormal(rng, output, 0.8, 1, 2_000), blocks


def _mooncake(rng: random.Random) -> Iterator[_Made]:
    return _conversations(rng, opening=8_700, turn=4_400, output=350, go_on=0.32, prefixes=200)


def _chat(rng: random.Random) -> Iterator[_Made]:
    return _conversations(rng, opening=700, turn=300, output=250, go_on=0.6, prefixes=40)


def _hot(rng: random.Random) -> Iterator[_Made]:
    others, names = _mooncake(rng), _Names(rng)
    hot = tuple(b"hot" + name[3:] for name in names.fresh(16))
    own = 0
    while True:
        if rng.random() >= 0.9:
            yield next(others)
            continue
        tokens = len(hot) * BLOCK_TOKENS + _lognormal(rng, 2_000, 1.0, 32, 60_000)
        count = tokens // BLOCK_TOKENS - len(hot)
        tail = tuple(b"own" + n.to_bytes(13, "big") for n in range(own, own + count))
        own += count
        yield tokens, _lognormal(rng, MEAN_OUTPUT, 0.8, 1, 2_000), hot + tail


def load_trace(path: Path, *, rate: float | None = None, limit: int | None = None) -> list[Request]:
    """A file in Mooncake's form; `rate` stretches its time to so many requests per second. Raises ConfigError."""
    requests = []
    try:
        with path.open() as file:
            for number, line in enumerate(file):
                if limit is not None and number >= limit:
                    break
                row = json.loads(line)
                full = int(row["input_length"]) // BLOCK_TOKENS
                blocks = tuple(int(name).to_bytes(16, "big") for name in row["hash_ids"][:full])
                at_s = float(row["timestamp"]) / 1e3
                requests.append(Request(number, at_s, int(row["input_length"]), int(row["output_length"]), blocks))
    except OSError as exc:
        raise ConfigError(f"trace {path}: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(f"trace {path}, line {len(requests) + 1}: {type(exc).__name__}: {exc}") from exc
    if not requests:
        raise ConfigError(f"trace {path} is empty")
    if rate is not None and requests[-1].at_s > 0:
        stretch = len(requests) / rate / requests[-1].at_s
        requests = [replace(r, at_s=r.at_s * stretch) for r in requests]
    return requests


def reuse(requests: list[Request]) -> float:
    """The share of blocks that an endless cache would find."""
    seen: set[bytes] = set()
    found = total = 0
    for request in requests:
        total += len(request.blocks)
        found += sum(name in seen for name in request.blocks)
        seen.update(request.blocks)
    return found / max(total, 1)
