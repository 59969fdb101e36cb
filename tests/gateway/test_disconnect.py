"""Clients that leave or stop reading: their requests are cancelled at the nodes, and nothing is left of them."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from kvferry.services.gateway import asgi, server
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, eventually, gateway, run, text_of
from tests.gateway.tiny_tokenizer import tiny_tokenizer

PROMPT = "The quick brown fox"


def cancelled(node: FakeDecode) -> bool:
    return node.num_running == 0 and bool(node.cancelled)


async def leave_after(setup: Setup, num_lines: int, **fields: Any) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "stream": True, "max_tokens": 400} | fields
    async with setup.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        for _ in range(num_lines):
            await anext(lines)


def test_a_client_that_leaves_a_stream_is_cancelled_everywhere() -> None:
    async def scenario(setup: Setup) -> None:
        await leave_after(setup, 5, n=2)
        await eventually(lambda: cancelled(setup.nodes[0]))
        await eventually(lambda: setup.metric("request_success_total", finished_reason="abort") == 2)
        assert setup.metric("requests_aborted_total") == 1

    run(gateway(FakeDecode(Behaviour(step_s=0.005)), over_port=True), scenario)


@pytest.mark.parametrize("hang_after", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_waiting_is_cancelled(stream: bool, hang_after: int) -> None:
    async def scenario(setup: Setup) -> None:
        body = {"prompt": PROMPT, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            async with setup.client.stream("POST", "/v1/completions", json=body, timeout=0.3) as response:
                await response.aread()
        await eventually(lambda: cancelled(setup.nodes[0]))

    run(gateway(FakeDecode(Behaviour(hang_after=hang_after)), over_port=True), scenario)


def test_48_abandoned_streams_leave_nothing() -> None:
    async def scenario(setup: Setup) -> None:
        rng = random.Random(1)
        await asyncio.gather(*(leave_after(setup, rng.randrange(8)) for _ in range(48)))
        await eventually(lambda: setup.metric("num_requests_running") == 0)
        await eventually(lambda: all(node.num_running == 0 for node in setup.nodes))
        assert setup.metric("request_success_total", finished_reason="abort") == 48
        assert (await setup.complete(PROMPT, max_tokens=1)).status_code == 200

    nodes = [FakeDecode(Behaviour(step_s=0.01), node_id=f"d{n}") for n in range(2)]
    run(gateway(*nodes, over_port=True), scenario)


def test_a_client_that_accepts_nothing_is_cancelled_and_its_connection_dropped() -> None:
    """Its tokens pile up behind a small window until the connection's buffers are full."""

    async def scenario(setup: Setup) -> None:
        host, port = setup.client.base_url.host, setup.client.base_url.port
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await asyncio.get_running_loop().run_in_executor(None, client.connect, (host, port))
            body = {
                "messages": [{"role": "user", "content": "x"}],
                "stream": True,
                "logprobs": True,
                "top_logprobs": 20,
            }
            raw = json.dumps(body).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
            client.sendall(head.encode() + raw)
            await eventually(lambda: setup.metric("client_stalls_total") == 1, within_s=20)
            await eventually(lambda: cancelled(setup.nodes[0]))
            assert setup.server is not None
            connections = setup.server.server_state.connections
            await eventually(lambda: not connections)
            assert (await setup.complete(PROMPT, max_tokens=1)).status_code == 200, "others are served"

    def endless(request: Any, index: int) -> list[int]:
        return list(range(100, 130)) * 1000

    node = FakeDecode(Behaviour(tokens=endless, tokens_per_step=20), max_model_len=100_000)
    run(gateway(node, over_port=True, client_stall_timeout=0.4), scenario)


def test_a_slow_reader_gets_fewer_larger_events_and_every_token() -> None:
    async def scenario(setup: Setup) -> None:
        sent: list[bytes] = []
        raw = json.dumps({"prompt": "Hello world " * 5, "stream": True, "max_tokens": 100}).encode()
        requests = iter([{"type": "http.request", "body": raw, "more_body": False}])

        async def receive() -> dict[str, Any]:
            message = next(requests, None)
            if message is None:
                await asyncio.Event().wait()
                raise AssertionError
            return message

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.sleep(0.05)
                sent.append(message["body"])

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "headers": [],
            "query_string": b"",
            "root_path": "",
            "http_version": "1.1",
            "scheme": "http",
            "server": ("x", 1),
            "client": ("y", 2),
        }
        await setup.gateway.app(scope, receive, send)
        lines = b"".join(sent).decode().strip().split("\n\n")
        stream = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        ids = tiny_tokenizer().encode("Hello world " * 5)
        expected = tiny_tokenizer().decode((ids * 10)[:100])
        assert text_of(stream) == expected
        assert len(stream) < 50
        assert stream[-1]["choices"][0]["finish_reason"] == "length"

    run(gateway(FakeDecode(Behaviour(step_s=0.002))), scenario)


def test_what_a_client_has_not_read_waits_as_tokens_and_comes_in_order() -> None:
    """While its connection is full, nothing more is written to it."""
    ids = (tiny_tokenizer().encode("The quick brown fox ") * 500)[:3000]

    async def scenario(setup: Setup) -> None:
        assert setup.server is not None
        for listener in setup.server.servers[0].sockets:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, (setup.client.base_url.host, setup.client.base_url.port))
            raw = json.dumps({"prompt": "x", "stream": True, "max_tokens": len(ids)}).encode()
            head = HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(raw)
            await loop.sock_sendall(client, head + raw)
            await eventually(lambda: len(setup.nodes[0].submitted) == 1)
            sessions = setup.gateway.pool.sessions.values()
            await eventually(lambda: all(not session.num_requests for session in sessions), within_s=20)
            (connection,) = setup.server.server_state.connections
            assert connection.transport.get_write_buffer_size() < 2 * 2**16, "of more than 500 kB"
            answer = b""
            while part := await loop.sock_recv(client, 2**16):
                answer += part
        lines = [line for line in answer.split(b"\n") if line.startswith(b"data: ")]
        assert lines.pop() == b"data: [DONE]"
        assert text_of([json.loads(line.removeprefix(b"data: ")) for line in lines]) == tiny_tokenizer().decode(ids)
        assert len(lines) < len(ids)

    node = FakeDecode(Behaviour(tokens=lambda request, index: ids), max_model_len=100_000)
    run(gateway(node, over_port=True), scenario)


def test_a_client_that_sends_half_a_request_is_not_waited_for() -> None:
    async def scenario(setup: Setup) -> None:
        host, port = setup.client.base_url.host, setup.client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()

    run(gateway(FakeDecode(), over_port=True, client_stall_timeout=0.2), scenario)


async def answer_to(setup: Setup, pieces: Iterable[bytes], pause_s: float = 0.0) -> bytes:
    """What a connection that sends `pieces` reads until it is closed."""
    reader, writer = await asyncio.open_connection(setup.client.base_url.host, setup.client.base_url.port)

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    sending = asyncio.create_task(send())
    try:
        return await asyncio.wait_for(reader.read(), 15)
    except ConnectionError:
        return b""
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def test_a_body_that_trickles_in_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time for the stall timeout, so only the rate tells."""
    monkeypatch.setattr(asgi, "MIN_BODY_BYTES_PER_S", 10**9)

    async def scenario(setup: Setup) -> None:
        chunked = [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n \r\n"] * 1000]
        answer = await answer_to(setup, chunked, 0.02)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"of the body came in" in answer

    run(gateway(FakeDecode(), over_port=True, client_stall_timeout=1.0), scenario)


def test_a_header_that_trickles_in_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)

    async def scenario(setup: Setup) -> None:
        assert await answer_to(setup, [HEAD + b"x: ", *[b"a"] * 1000], 0.02) == b""
        warm = [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", HEAD + b"x: ", *[b"a"] * 1000]
        assert (await answer_to(setup, warm, 0.02)).startswith(b"HTTP/1.1 200 ")

    run(gateway(FakeDecode(), over_port=True), scenario)


@pytest.mark.parametrize(
    "header",
    [
        [b"x-a: " + b"y" * server.MAX_HEADER_BYTES + b"\r\n\r\n"],
        [b"".join(b"x-%d: y\r\n" % number for number in range(10_000)) + b"\r\n"],
        [b"x-a: ", *[b"y" * 1000] * 1000],
        [b"x-%d: y\r\n" % number for number in range(20_000)],
    ],
    ids=["one", "many", "endless", "endlessly many"],
)
def test_endless_headers_are_refused_and_nothing_of_them_reaches_the_app(header: list[bytes]) -> None:
    async def scenario(setup: Setup) -> None:
        answer = await answer_to(setup, [HEAD, *header])
        assert not answer or answer.startswith(b"HTTP/1.1 431 ")  # a client that still sends may see a reset only
        assert not setup.nodes[0].submitted
        ordinary = await setup.client.get("/health", headers={"x-large": "y" * (server.MAX_HEADER_BYTES // 2)})
        assert ordinary.status_code == 200

    run(gateway(FakeDecode(), over_port=True), scenario)


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nHos"])
def test_a_connection_without_a_whole_header_is_closed(head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 1)

    async def scenario(setup: Setup) -> None:
        host, port = setup.client.base_url.host, setup.client.base_url.port
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()
        await writer.wait_closed()

    run(gateway(FakeDecode(), over_port=True), scenario)
