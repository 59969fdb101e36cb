"""Block transfer between two processes: rate, CPU time and latency of each transport, beside a plain memory copy.

    python -m benchmarks transfer [--transports shm,ucx,grpc] [--block-bytes 46080,...] [--blocks 1,32,256,1024,4096]
                                  [--max-mb 256] [--seconds 0.5] [--shuffled] [--link 10gbit]

Before any figure each transport has to bring every block of the pool, in shuffled order, byte for byte. Rounds of the
transports and of the copies are interleaved; rates are medians. *Of copy* is the share of a plain copy of as many
bytes, which for few bytes is one within the cache, *of memory* that of a plain copy of 256 MiB, before and after. Each
one that is timed follows one of its own kind, so that none writes back what another left in the cache. CPU time is that
of both processes. Pulls above `--max-mb` are left out. ucx runs over what UCX_TLS says, and without it over whatever
UCX finds; pulls of 8 MB and more are compared with `ucx_perftest` over the same. `--link 10gbit` puts owner and reader
into two network namespaces with a wire of that rate between them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
import timeit
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection

import numpy as np
import psutil

from benchmarks import perftest
from benchmarks.link import End, Link, link
from kvferry.common.nodes import LayoutCard
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.aio import Server
from kvferry.services.transfer.base import Peer
from kvferry.services.transfer.copier import Blocks
from kvferry.services.transfer.grpc import block_checksum
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.puller import Puller
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.server import BlocksServicer

SHM_DIR = "/dev/shm"
PERFTEST_MIN_BYTES = 8_000_000
"""Pulls from here on are compared with UCX's own benchmark, in turns."""
PERFTEST_ROUNDS = 3
MEMORY_BYTES = 256 * 2**20
CARD = LayoutCard("benchmark", "numerics", "float32", 16, 2, 1, 8, "0")


@dataclass(frozen=True)
class Said:
    """By the owner, once it listens."""

    pid: int
    address: str
    lease_id: str


@dataclass
class Measured:
    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


def content(num_blocks: int, block_bytes: int) -> Blocks:
    return np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)


def own(pipe: Connection, num_blocks: int, block_bytes: int, transports: tuple[str, ...], end: End | None) -> None:
    """The owner's process, until it is told to end."""
    if end:
        end.enter()
    asyncio.run(_own(pipe, num_blocks, block_bytes, transports, end.address if end else "127.0.0.1"))


async def _own(pipe: Connection, num_blocks: int, block_bytes: int, transports: tuple[str, ...], host: str) -> None:
    segment = PoolSegment.create(SHM_DIR, "owner", num_blocks, block_bytes)
    try:
        segment.buffer[:] = content(num_blocks, block_bytes)
        leases = LeaseTable(lambda _: None, lambda _: None, lease_s=3600.0)
        lease_id = leases.open("benchmark").lease_id
        leases.extend(lease_id, range(num_blocks))
        servicer = BlocksServicer("owner")
        servicer.serve(CARD, segment, leases, transports)
        server = Server(lambda raw: pb_grpc.add_BlocksServicer_to_server(servicer, raw), ())
        address = f"{host}:{await server.start(host, 0)}"
        pipe.send(Said(psutil.Process().pid, address, lease_id))
        await asyncio.to_thread(pipe.recv)
        await server.stop(0)
        servicer.close()
    finally:
        segment.close()


@contextlib.contextmanager
def owner(num_blocks: int, block_bytes: int, transports: tuple[str, ...], end: End | None) -> Iterator[Said]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=own, args=(there, num_blocks, block_bytes, transports, end), daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
        here.send("end")
        process.join(10.0)
    finally:
        process.kill()


@contextlib.asynccontextmanager
async def pullers(
    said: Said, segment: PoolSegment, transports: tuple[str, ...]
) -> AsyncIterator[dict[str, tuple[Puller, Peer]]]:
    """One for each transport, which may use no other."""
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for name in transports:
            puller = Puller(CARD, "reader", segment, (name,), timeout_s=30.0)
            stack.push_async_callback(puller.aclose)
            found[name] = puller, await puller.connect(said.address, "owner")
        yield found


async def check(name: str, puller: Puller, peer: Peer, said: Said, segment: PoolSegment, expected: Blocks) -> None:
    src, dst = (np.random.default_rng(seed).permutation(len(expected)) for seed in (1, 2))
    segment.buffer[:] = 0xEE
    await puller.pull(peer, said.lease_id, src.tolist(), dst.tolist())
    if not np.array_equal(segment.buffer[dst], expected[src]):
        raise SystemExit(f"{name}: the bytes differ: no figures")


async def measure(
    reader: dict[str, tuple[Puller, Peer]],
    said: Said,
    segment: PoolSegment,
    source: Blocks,
    ids: list[int],
    found: dict[str, Measured],
    budget_s: float,
) -> None:
    """Rounds of one pull by each transport and one copy, until each has had its time and five rounds are done."""
    count, owner_process, rounds_before = len(ids), psutil.Process(said.pid), len(found["copy"].seconds)
    deadline = time.perf_counter() + budget_s * len(found)
    while time.perf_counter() < deadline or len(found["copy"].seconds) < rounds_before + 5:
        np.copyto(segment.buffer[:count], source[:count])
        started = time.perf_counter()
        np.copyto(segment.buffer[:count], source[:count])
        found["copy"].seconds.append(time.perf_counter() - started)
        for name, (puller, peer) in reader.items():
            await puller.pull(peer, said.lease_id, ids, ids)
            cpu = time.process_time() + sum(owner_process.cpu_times()[:2])
            started = time.perf_counter()
            for _ in range(rounds := max(1, 16 // count)):  # small ones at once: the owner's clock ticks in 10 ms
                await puller.pull(peer, said.lease_id, ids, ids)
            found[name].seconds.append((time.perf_counter() - started) / rounds)
            found[name].cpu_s += (time.process_time() + sum(owner_process.cpu_times()[:2]) - cpu) / rounds


def memory_rates(source: Blocks, dest: Blocks) -> list[float]:
    """Bytes per second that a plain copy brings from memory to memory."""
    rates = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(dest, source)
        rates.append(dest.nbytes / (time.perf_counter() - started))
    return rates


def print_rows(block_bytes: int, count: int, found: dict[str, Measured], memory_rate: float) -> None:
    num_bytes = block_bytes * count
    copy_rate = num_bytes / statistics.median(found["copy"].seconds)
    for name, measured in found.items():
        median_s = statistics.median(measured.seconds)
        rate = num_bytes / median_s
        cpu = "" if name == "copy" else f"{measured.cpu_s / (len(measured.seconds) * num_bytes / 1e9):8.2f}"
        print(f"{block_bytes:10,d} {count:7,d}  {name:5s} {rate / 1e6:9.0f} {rate / copy_rate:7.1%} "
              f"{rate / memory_rate:9.1%} {1e3 * median_s:10.3f} {cpu}", flush=True)  # fmt: skip


def print_perftest(block_bytes: int, count: int, ucx: Measured, rates: list[dict[str, float]]) -> None:
    """Of each way to run it the median; the best of these is the yardstick."""
    rate = block_bytes * count / statistics.median(ucx.seconds)
    medians = {way: statistics.median(found[way] for found in rates) for way in rates[0]}
    texts = (f"{way} {median / 1e6:.0f}" for way, median in medians.items())
    print(f"{block_bytes:10,d} {count:7,d}  perftest {', '.join(texts)} MB/s: "
          f"ucx reaches {rate / max(medians.values()):.0%} of the best", flush=True)  # fmt: skip


async def run(args: argparse.Namespace, block_bytes: int, transports: tuple[str, ...], wire: Link | None) -> None:
    counts = [count for count in args.blocks if count * block_bytes <= args.max_mb * 1e6]
    segment = PoolSegment.anonymous(max(counts), block_bytes)
    source = content(segment.num_blocks, block_bytes)
    large = np.ones((2, MEMORY_BYTES), dtype=np.uint8)
    order = np.random.default_rng(3).permutation if args.shuffled else range
    with owner(segment.num_blocks, block_bytes, transports, wire.owner if wire else None) as said:
        async with pullers(said, segment, transports) as reader:
            for name, (puller, peer) in reader.items():
                await check(name, puller, peer, said, segment, source)
            for count in counts:
                compares = "ucx" in transports and count * block_bytes >= PERFTEST_MIN_BYTES
                rates: list[dict[str, float]] = []
                found = {name: Measured() for name in ("copy", *reader)}
                memory = memory_rates(*large)
                for _ in range(rounds := PERFTEST_ROUNDS if compares else 1):
                    if compares:
                        rates.append(await asyncio.to_thread(perftest.rates, wire))
                    ids = [int(i) for i in order(count)]
                    await measure(reader, said, segment, source, ids, found, args.seconds / rounds)
                memory += memory_rates(*large)
                print_rows(block_bytes, count, found, statistics.median(memory))
                if compares:
                    print_perftest(block_bytes, count, found["ucx"], rates)


def print_checksum(block_bytes: int) -> None:
    """Of transports that cross a machine: once where a block leaves, once where it arrives."""
    blocks = content(2**26 // block_bytes, block_bytes)  # 64 MB, so that they come from memory
    rows = [memoryview(block) for block in blocks]
    took = timeit.repeat(lambda: [block_checksum(row, 0) for row in rows], number=1, repeat=9)
    rate = blocks.nbytes / statistics.median(took)
    print(f"{block_bytes:10,d}          checksum {rate / 1e9:.1f} GB/s", flush=True)


def run_all(args: argparse.Namespace, transports: tuple[str, ...], wire: Link | None = None) -> None:
    if wire:
        wire.reader.enter()
    print(f"{'block B':>10s} {'blocks':>7s}  {'over':5s} {'MB/s':>9s} {'of copy':>7s} {'of memory':>9s} "
          f"{'ms a pull':>10s} {'CPU s/GB':>8s}")  # fmt: skip
    for block_bytes in args.block_bytes:
        asyncio.run(run(args, block_bytes, transports, wire))
        print_checksum(block_bytes)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks transfer", description=__doc__)
    parser.add_argument("--transports", default="shm,ucx,grpc")
    parser.add_argument("--block-bytes", type=_numbers, default=[46_080, 262_144, 2_097_152])
    parser.add_argument("--blocks", type=_numbers, default=[1, 32, 256, 1024, 4096])
    parser.add_argument("--max-mb", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each transport and size")
    parser.add_argument("--shuffled", action="store_true", help="blocks that do not lie side by side")
    parser.add_argument("--link", metavar="RATE", help="between two network namespaces, at so much: 10gbit")
    args = parser.parse_args(argv)
    transports = tuple(args.transports.split(","))
    if "ucx" in transports and find_spec("ucxx") is None:
        print("ucx is left out: pip install 'kvferry[ucx]'", file=sys.stderr)
        transports = tuple(name for name in transports if name != "ucx")
    if args.link is None:
        run_all(args, transports)
        return 0
    with link(args.link) as wire:
        reader = multiprocessing.get_context("spawn").Process(target=run_all, args=(args, transports, wire))
        reader.start()
        reader.join()
        return reader.exitcode or 0
