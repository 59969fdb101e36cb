"""The prefix index in Redis: lookups, updates, memory, and how they grow.

    python -m benchmarks index [--blocks 1000000] [--nodes 64] [--json FILE] [--binary redis-server]
    python -m benchmarks index --chain 8192 --shared 8000 --blocks 200000 --nodes 1024 --only

Chains of 2,000 blocks (32,000 tokens) of which neighbours share the first 500, as chats share a system prompt; each is
held by one node. Coming: while as many prompts as are remembered are on their way. Held up: the longest that a command
takes Redis (its own clock) while half of the nodes are gone and lookups have their entries cleared. Answers are
compared with the memory index first. A Redis of its own, on a unix socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import redis.asyncio
import uvloop

from kvferry.common.nodes import LayoutCard, NodeRecord, Role
from kvferry.services.index.base import MAX_EXPECTED
from kvferry.services.index.memory import MemoryIndex
from kvferry.services.index.redis import RedisIndex
from kvferry.services.local.redis_server import find_redis_server, make_folder, redis_command, redis_url

BATCH = 1024
NUM_COMING = 2000
CARD = LayoutCard("fingerprint", "numerics", "bfloat16", 16, 32, 8, 128, "0.1.0")
TTL_S = 3600.0


@dataclass(frozen=True)
class Row:
    """Median and 99th percentile of lookups in ms; the longest command while the dead are cleared in ms; updates in
    blocks per second; memory in bytes per block entry, and per prompt that is coming."""

    num_blocks: int
    num_nodes: int
    lookup_ms: float
    lookup_p99_ms: float
    busy_lookup_ms: float
    coming_lookup_ms: float
    held_up_ms: float
    updates_per_s: float
    bytes_per_entry: float
    bytes_per_coming: float


@dataclass(frozen=True)
class Shape:
    """Blocks of a chain, and how many of them it shares with all others."""

    chain: int = 2000
    shared: int = 500


class Load:
    """What each node holds: `chains[i]` is node `i % num_nodes`'s."""

    def __init__(self, num_blocks: int, num_nodes: int, shape: Shape) -> None:
        rng = random.Random(num_blocks)
        own = shape.chain - shape.shared
        self.shared = [rng.randbytes(16) for _ in range(shape.shared)]
        count = max(round(num_blocks / shape.chain / 2), round((num_blocks - shape.shared * num_nodes) / own), 1)
        self.chains = [self.shared + [rng.randbytes(16) for _ in range(own)] for _ in range(count)]
        self.nodes = [f"instance-{i}" for i in range(num_nodes)]

    def of(self, node: int) -> list[bytes]:
        mine = self.chains[node :: len(self.nodes)]
        return [name for number, names in enumerate(mine) for name in (names[len(self.shared) :] if number else names)]


def record(instance: str) -> NodeRecord:
    return NodeRecord(instance, f"node-{instance}", Role.PREFILL, "127.0.0.1:1", "model", CARD, 131072)


@asynccontextmanager
async def server(binary: Path) -> AsyncIterator[str]:
    with make_folder() as folder:
        options = [*redis_command(binary, Path(folder)), "--maxmemory", "0"]
        process = await asyncio.create_subprocess_exec(*options, stdout=subprocess.DEVNULL)
        url = redis_url(Path(folder))
        client = redis.asyncio.from_url(url)
        try:
            for _ in range(1000):
                try:
                    await client.ping()
                    break
                except redis.ConnectionError:
                    await asyncio.sleep(0.01)
            yield url
        finally:
            await client.aclose()
            process.kill()
            await process.wait()


async def used_bytes(url: str) -> int:
    client = redis.asyncio.from_url(url)
    try:
        return int((await client.info("memory"))["used_memory"])
    finally:
        await client.aclose()


async def check(url: str) -> None:
    """Both indexes answer alike, before anything is measured."""
    load, memory, tested = Load(20_000, 8, Shape()), MemoryIndex(), RedisIndex(url, "check", timeout_s=30)
    for index in (memory, tested):
        for number, node in enumerate(load.nodes):
            await index.announce(record(node), TTL_S)
            await index.store(node, load.of(number))
        await index.remove(load.nodes[0], load.of(0)[1000:])
    for names in (*load.chains, load.shared, load.chains[0][::-1]):
        found, expected = await tested.match(names), await memory.match(names)
        assert found == expected, f"{found} instead of {expected}"
    await tested.aclose()


async def measure(url: str, num_blocks: int, num_nodes: int, num_lookups: int, shape: Shape) -> Row:
    load = Load(num_blocks, num_nodes, shape)
    index = RedisIndex(url, f"n{num_blocks}-{num_nodes}", timeout_s=30)
    for node in load.nodes:
        await index.announce(record(node), TTL_S)
    held = [load.of(number) for number in range(num_nodes)]
    total = sum(map(len, held))
    before = await used_bytes(url)
    begun = time.perf_counter()
    await _store_all(index, load, held)
    stored_s = time.perf_counter() - begun
    memory = await used_bytes(url) - before
    times = await _lookups(index, load, num_lookups)
    busy = asyncio.create_task(_busy(index, load, held))
    busy_times = await _lookups(index, load, num_lookups // 4)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    before_coming = await used_bytes(url)
    for number in range(NUM_COMING):
        await index.expect(load.nodes[number % num_nodes], [number.to_bytes(16), *load.chains[0]], TTL_S)
    memory_coming = await used_bytes(url) - before_coming
    for number in range(MAX_EXPECTED):
        await index.expect(load.nodes[number % num_nodes], load.chains[number % len(load.chains)], TTL_S)
    coming_times = await _lookups(index, load, num_lookups)
    held_up = await _longest_command_ms(url, index, load)
    await index.aclose()
    return Row(
        total,
        num_nodes,
        statistics.median(times),
        statistics.quantiles(times, n=100)[98],
        statistics.median(busy_times),
        statistics.median(coming_times),
        held_up,
        total / stored_s,
        memory / total,
        memory_coming / NUM_COMING,
    )


async def _store_all(index: RedisIndex, load: Load, held: list[list[bytes]]) -> None:
    """All nodes at once, each a batch after the other."""
    gate = asyncio.Semaphore(8)

    async def store(node: str, names: list[bytes]) -> None:
        for start in range(0, len(names), BATCH):
            async with gate:
                await index.store(node, names[start : start + BATCH])

    await asyncio.gather(*(store(node, names) for node, names in zip(load.nodes, held, strict=True)))


async def _busy(index: RedisIndex, load: Load, held: list[list[bytes]]) -> None:
    """50,000 blocks a second come and go, 256 at a time."""
    rng = random.Random(1)
    while True:
        node = rng.randrange(len(held))
        names = held[node][-256:]
        await index.remove(load.nodes[node], names)
        await index.store(load.nodes[node], names)
        await asyncio.sleep(512 / 50_000)


async def _longest_command_ms(url: str, index: RedisIndex, load: Load) -> float:
    """Every other node leaves; then each chain is looked up, and what the dead held of it is cleared behind that."""
    client = redis.asyncio.from_url(url)
    for node in load.nodes[::2]:
        await index.withdraw(node)
    await client.config_set("slowlog-max-len", 4096)
    await client.config_set("slowlog-log-slower-than", 100)
    await client.slowlog_reset()  # Redis has noted what took longer than 10 ms while it was filled
    try:
        for names in load.chains[: len(load.nodes)]:
            await index.match(names)
            while index.clearing is not None:
                await index.clearing
        return max((entry["duration"] for entry in await client.slowlog_get(4096)), default=0) / 1e3
    finally:
        await client.aclose()


async def _lookups(index: RedisIndex, load: Load, count: int) -> list[float]:
    rng, times = random.Random(2), []
    for _ in range(count):
        names = rng.choice(load.chains)
        begun = time.perf_counter()
        found = await index.match(names)
        times.append(1000 * (time.perf_counter() - begun))
        assert max(found.held.values()) >= len(load.shared)
    return times


async def run(
    binary: Path, num_blocks: int, num_nodes: int, num_lookups: int, shape: Shape, *, is_one: bool
) -> list[Row]:
    sizes = [(num_blocks, num_nodes)]
    if not is_one:
        sizes = [(n, num_nodes) for n in (10_000, 100_000) if n < num_blocks] + sizes
        sizes += [(num_blocks, n) for n in (8, 512) if n != num_nodes]
    rows = []
    for blocks, nodes in sizes:
        async with server(binary) as url:
            if not rows:
                await check(url)
            rows.append(await measure(url, blocks, nodes, num_lookups, shape))
    return rows


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks index", description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--lookups", type=int, default=400)
    parser.add_argument("--chain", type=int, default=Shape.chain, help="blocks of a prompt")
    parser.add_argument("--shared", type=int, default=Shape.shared, help="of them, those that all prompts share")
    parser.add_argument("--only", action="store_true", help="this size alone, without what shows growth")
    parser.add_argument("--binary", type=Path, default=None, help="redis-server (default: the one of `kvferry up`)")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    binary = args.binary or find_redis_server()
    version = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
    rows = uvloop.run(
        run(binary, args.blocks, args.nodes, args.lookups, Shape(args.chain, args.shared), is_one=args.only)
    )
    print(
        f"Redis {version.removeprefix('v=')}, lookups of {args.chain} blocks; busy: while 50,000 blocks/s come and go\n"
    )
    times = f"{'lookup ms':>10} {'p99':>7} {'busy':>7} {'coming':>7} {'held up':>8}"
    print(f"{'entries':>9} {'nodes':>6} {times} {'updates/s':>10} {'bytes/entry':>12} {'bytes/coming':>13}")
    for r in rows:
        print(
            f"{r.num_blocks:9,} {r.num_nodes:6} {r.lookup_ms:10.2f} {r.lookup_p99_ms:7.2f} {r.busy_lookup_ms:7.2f} "
            f"{r.coming_lookup_ms:7.2f} {r.held_up_ms:8.2f} {r.updates_per_s:10,.0f} {r.bytes_per_entry:12.0f} "
            f"{r.bytes_per_coming:13.0f}"
        )
    if args.json:
        args.json.write_text(json.dumps({"redis": version, "rows": [asdict(r) for r in rows]}, indent=1))
    return 0
