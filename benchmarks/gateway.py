"""What a gateway process adds to each token, and how many it can stream: before a decode node that computes nothing.

    python -m benchmarks gateway [--streams 50] [--rates 5000,10000,20000] [--runs 1] [--compare SRC] [--peers VENV]

One core for the gateway, another one for the node and the clients. Each token is one server-sent event; a gateway that
falls behind puts several into one, which *events* shows. *Added* is from the node's sending a step to the client's
having read the token. No figure before every stream's text is right. `--compare`: another checkout's `src`, whose
gateway is measured in turns with this one. `--peers`: a virtual environment with other routers, which get the same
tokens as server-sent events from a node that speaks HTTP (`benchmarks.fake_http`): they pass on what our gateway makes.
With several runs, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import psutil
import uvloop

from benchmarks.gateway_servers import Server, peers
from benchmarks.index import server as redis_server
from benchmarks.load import quantile
from kvferry.common.models import resolve_model
from kvferry.services.gateway.tokenizer import Tokenizer
from kvferry.services.local.plan import free_ports
from kvferry.services.local.redis_server import find_redis_server

GATEWAY_CORE, OTHER_CORE = 0, 1
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Row:
    """Tokens per second that were streamed, and that the gateway's core could have; milliseconds added per token."""

    name: str
    asked_tok_s: int
    tok_s: float
    tok_s_per_core: float
    events_per_token: float
    added_p50_ms: float
    added_p99_ms: float


@dataclass
class Stream(asyncio.Protocol):
    """One completion over a connection of its own; parsed when all are done, so that the clients cost little."""

    body: bytes
    done: asyncio.Future[None]
    chunks: list[tuple[float, bytes]] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(self.body)}\r\n\r\n"
        self._transport, self._end = cast(asyncio.Transport, transport), b""
        self._transport.write(head.encode() + self.body)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.monotonic(), data))
        self._end = (self._end + data[-5:])[-5:]
        if self._end == b"0\r\n\r\n" or not self.chunks[0][1].startswith(b"HTTP/1.1 200"):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def events(self) -> list[tuple[float, str, str]]:
        """When each came, the response's id, and its text. Raises on anything but a complete answer."""
        found: list[tuple[float, str, str]] = []
        if not self.chunks[0][1].startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"refused: {self.chunks[0][1][:500]!r}")
        rest, is_whole = b"", False
        for at_s, data in _bodies(self.chunks):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    found.append((at_s, event["id"], event["choices"][0]["text"]))
                is_whole |= line == b"data: [DONE]"
        if not is_whole:
            raise RuntimeError(f"not a complete answer: … {self.chunks[-1][1][-200:]!r}")
        return found


def _bodies(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """What is in an answer's chunks, which may begin and end anywhere in events and in what is read at once."""
    rest, in_header = b"", True
    for at_s, data in pieces:
        rest += data
        if in_header:
            head, end, rest = rest.partition(b"\r\n\r\n")
            in_header = not end
            rest = rest or (head if in_header else b"")
        while not in_header and (at := rest.find(b"\r\n")) >= 0:
            size = int(rest[:at], 16)
            if len(rest) < at + size + 4:
                break
            yield at_s, rest[at + 2 : at + 2 + size]
            rest = rest[at + size + 4 :]


def _same(stream: Stream) -> Stream:
    return stream


async def run_streams(port: int, prompts: Sequence[list[int] | str], num_tokens: int) -> list[Stream]:
    loop, streams = asyncio.get_running_loop(), []
    for prompt in prompts:
        body = {"model": "bench", "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        stream = Stream(json.dumps(body).encode(), loop.create_future())
        streams.append(stream)
        await loop.create_connection(partial(_same, stream), "127.0.0.1", port)
    await asyncio.gather(*(stream.done for stream in streams))
    return streams


class Bench:
    def __init__(self, folder: Path, redis_url: str) -> None:
        self._folder, self._redis_url = folder, redis_url
        self._tokenizer = Tokenizer.load(folder)
        ids = range(100, self._tokenizer.vocab_size)
        plain = (
            i for i in ids if self._tokenizer.token_bytes(i).isalpha() and self._tokenizer.token_bytes(i).isascii()
        )
        self._ids = [next(plain) for _ in range(2000)]

    async def measure(self, server: Server, num_streams: int, rate: int, seconds: float) -> Row:
        """Starts the node and the gateway, warms them up, and runs all streams at once."""
        port, node_port, metrics_port = free_ports("127.0.0.1", 3)
        node_command = server.node_command(self._redis_url, node_port, 1000.0 * num_streams / rate)
        with _started(OTHER_CORE, node_command) as node:
            try:
                if server.peer:
                    await _until_ready(node_port, "/health", node)
                command = server.command(self._redis_url, self._folder, port, node_port, metrics_port)
                with _started(GATEWAY_CORE, command, server.source) as gateway:
                    try:
                        await _until_ready(port, server.ready_path, gateway)
                        return await self._run(server, port, gateway.pid, node, num_streams, rate, seconds)
                    finally:
                        gateway.kill()
            finally:
                node.kill()

    async def _run(
        self,
        server: Server,
        port: int,
        pid: int,
        node: subprocess.Popen[bytes],
        num_streams: int,
        rate: int,
        seconds: float,
    ) -> Row:
        texts = [[self._tokenizer.token_text(i) for i in self._ids[k : k + PROMPT_TOKENS]] for k in range(num_streams)]
        ids = [self._ids[i : i + PROMPT_TOKENS] for i in range(num_streams)]
        prompts = [" ".join(words) for words in texts] if server.peer else ids
        num_tokens = max(round(rate * seconds / num_streams), 1)
        await run_streams(port, prompts, 20)
        process = psutil.Process(pid)
        before, begun = process.cpu_times(), time.monotonic()
        streams = await run_streams(port, prompts, num_tokens)
        wall_s, after = time.monotonic() - begun, process.cpu_times()
        node.send_signal(signal.SIGTERM)
        sent = json.loads(node.communicate()[0])
        cpu_s = after.user + after.system - before.user - before.system
        total = num_streams * num_tokens
        added, num_events = [], 0
        for words, stream in zip(texts, streams, strict=True):
            events = [event for event in stream.events() if event[2]]
            num_events += len(events)
            expected = itertools.islice(itertools.cycle(words), num_tokens)
            if "".join(text for *_, text in events) != "".join(expected):
                raise RuntimeError("a stream's text is wrong")
            if len(events) == num_tokens:
                response_id = events[0][1]
                sent_at = sent.get(response_id) or sent[f"{response_id}-0"]
                added += [1e3 * (at - sent_s) for (at, *_), sent_s in zip(events, sent_at, strict=True)]
        added = added or [float("nan")]
        p50, p99 = statistics.median(added), quantile(added, 0.99)
        return Row(server.name, rate, total / wall_s, total / cpu_s, num_events / total, p50, p99)


def _started(core: int, command: list[str], source: str = "") -> subprocess.Popen[bytes]:
    environ = os.environ | ({"PYTHONPATH": source} if source else {})
    return subprocess.Popen(["taskset", "-c", str(core), *command], stdout=subprocess.PIPE, env=environ)


async def _until_ready(port: int, path: str, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}{path}", None, 5)
            return
        except OSError:
            await asyncio.sleep(0.1)


async def run(args: argparse.Namespace) -> list[Row]:
    os.sched_setaffinity(0, {OTHER_CORE})
    servers = [Server("this")] + ([Server("compared", args.compare)] if args.compare else [])
    servers += peers(args.peers) if args.peers else []
    rows: dict[tuple[str, int], list[Row]] = {}
    async with redis_server(find_redis_server()) as url:
        bench = Bench(resolve_model(args.model, weights=False), url)
        for _ in range(args.runs):
            for rate, server in itertools.product(args.rates, servers):
                row = await bench.measure(server, args.streams, rate, args.seconds)
                rows.setdefault((server.name, rate), []).append(row)
    return [_median(same) for _, same in sorted(rows.items(), key=lambda item: item[0][1])]


def _median(rows: list[Row]) -> Row:
    """Of several rows of one gateway and rate."""
    _, _, *figures = zip(*map(astuple, rows), strict=True)
    return Row(rows[0].name, rows[0].asked_tok_s, *map(statistics.median, figures))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks gateway", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument(
        "--rates", type=lambda text: [int(part) for part in text.split(",")], default=[5000, 10000, 20000]
    )
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--compare", default="")
    parser.add_argument("--peers", type=Path)
    args = parser.parse_args(argv)
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("needs two cores: one for the gateway, one for all else")
    rows = uvloop.run(run(args))
    print(f"{args.streams} streams\n")
    print(
        f"{'gateway':13} {'asked tok/s':>11} {'tok/s':>8} {'per core':>9} {'events':>7} {'added p50 ms':>13} {'p99':>7}"
    )
    for row in rows:
        print(
            f"{row.name:13} {row.asked_tok_s:11,} {row.tok_s:8,.0f} {row.tok_s_per_core:9,.0f} "
            f"{row.events_per_token:7.3f} {row.added_p50_ms:13.2f} {row.added_p99_ms:7.2f}"
        )
    return 0
