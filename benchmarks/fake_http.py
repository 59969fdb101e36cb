"""The same node as an OpenAI server, for routers that pass HTTP on: streams `/v1/completions`, an event per token.

    python -m benchmarks.fake_http PORT

Steps, answers and what it prints on SIGTERM are those of `benchmarks.fake_decode`, but each word of the prompt is a
token, and requests go by the response's id.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import time
from typing import Any, cast

import uvloop

from benchmarks.fake_decode import Pace

OK = b"HTTP/1.1 200 OK\r\n"
STREAM_HEAD = OK + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


class _Running:
    """One stream; its events are encoded before it begins."""

    def __init__(self, response_id: str, texts: list[str], num_tokens: int, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.left = num_tokens
        self.sent_at: list[float] = []
        self._events = itertools.cycle([_chunk(_event(response_id, text, None)) for text in texts])
        self._last = _chunk(_event(response_id, texts[(num_tokens - 1) % len(texts)], "length")) + _chunk(DONE)

    def next(self) -> None:
        event, self.left = next(self._events), self.left - 1
        self.sent_at.append(time.monotonic())
        self.transport.write(event if self.left else self._last + b"0\r\n\r\n")


class FakeServer:
    def __init__(self) -> None:
        self.sent_at: dict[str, list[float]] = {}
        self._running: list[_Running] = []
        self._come = asyncio.Event()

    async def step_forever(self, step_s: float) -> None:
        pace = Pace(step_s)
        while True:
            await self._come.wait()
            await pace.wait()
            for request in self._running:
                request.next()
            self._running = [request for request in self._running if request.left]
            if not self._running:
                self._come.clear()

    def answer(self, path: str, body: bytes, transport: asyncio.Transport) -> None:
        if path != "/v1/completions":  # what routers ask of a server before they use it
            about = json.dumps({"object": "list", "data": [{"id": "bench", "object": "model"}]}).encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(about)
            transport.write(OK + head + about)
            return
        asked = json.loads(body)
        response_id = f"cmpl-{len(self.sent_at)}"
        request = _Running(response_id, asked["prompt"].split(" "), asked["max_tokens"], transport)
        self.sent_at[response_id] = request.sent_at
        transport.write(STREAM_HEAD)
        self._running.append(request)
        self._come.set()


class Connection(asyncio.Protocol):
    """HTTP/1.1 as routers speak it: bodies of a stated length."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (at := self._data.find(b"\r\n\r\n")) >= 0:
            request, *lines = self._data[:at].decode("latin-1").split("\r\n")
            if not request.endswith(" HTTP/1.1"):  # somebody tries whether gRPC is spoken here
                self._transport.close()
                return
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            end = at + 4 + int(headers.get("content-length", 0))
            if len(self._data) < end:
                return
            body, self._data = self._data[at + 4 : end], self._data[end:]
            self._server.answer(request.split(" ")[1], body, self._transport)


def _event(response_id: str, text: str, finish_reason: str | None) -> bytes:
    choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    event = {"id": response_id, "object": "text_completion", "created": 0, "model": "bench", "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def run(port: int, step_s: float) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    node = FakeServer()
    server = await loop.create_server(lambda: Connection(node), "127.0.0.1", port)
    stepping = asyncio.create_task(node.step_forever(step_s))
    await stopped.wait()
    print(json.dumps(node.sent_at), flush=True)
    stepping.cancel()
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks.fake_http", description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    uvloop.run(run(args.port, args.step_ms / 1000))
