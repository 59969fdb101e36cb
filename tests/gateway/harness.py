"""A gateway in this process in front of fake decode nodes, over ASGI or a real port."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from kvferry.common.config import Config, load_config
from kvferry.services.gateway.app import Gateway
from kvferry.services.gateway.http_tls import HttpTls
from kvferry.services.gateway.server import Server, bind, uvicorn_config
from kvferry.services.index.memory import MemoryIndex
from tests.gateway.fake_decode import FakeDecode
from tests.gateway.tiny_tokenizer import tiny_tokenizer


def config(**flags: Any) -> Config:
    return load_config({"model": "tiny"} | flags, environ={})


@dataclass
class Setup:
    gateway: Gateway
    client: httpx.AsyncClient
    index: MemoryIndex
    nodes: tuple[FakeDecode, ...]
    server: Server | None = None

    async def announce(self, *nodes: FakeDecode) -> None:
        for node in nodes or self.nodes:
            await self.index.announce(node.record(), 60)

    async def complete(self, prompt: Any = "Hello", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})

    async def chat(self, messages: Any = "Hello", **fields: Any) -> httpx.Response:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return await self.client.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **fields})

    def metric(self, name: str, **labels: str) -> float:
        return self.gateway.metrics.registry.get_sample_value(f"kvferry:{name}", labels) or 0.0


@asynccontextmanager
async def gateway(
    *nodes: FakeDecode, tokenizer: Any = None, over_port: bool = False, index: Any = None, **options: Any
) -> AsyncIterator[Setup]:
    """Nodes are started and announced. `over_port`: a real server, so that a client can leave."""
    index = index or MemoryIndex()
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
            await index.announce(node.record(), 60)
        running = None
        settings = config(**options)
        app = Gateway(settings, index, tokenizer or tiny_tokenizer())
        if over_port:
            running, base = await stack.enter_async_context(_served(app, HttpTls.of(settings.gateway)))
            client = httpx.AsyncClient(base_url=base, timeout=20)
        else:
            await stack.enter_async_context(app.running())
            client = httpx.AsyncClient(transport=httpx.ASGITransport(app.app), base_url="http://gateway", timeout=20)
        await stack.enter_async_context(client)
        yield Setup(app, client, index, nodes, running)


@asynccontextmanager
async def _served(app: Gateway, tls: HttpTls | None = None) -> AsyncIterator[tuple[Server, str]]:
    listener = bind("127.0.0.1", 0)
    ready = asyncio.Event()
    running = Server(uvicorn_config(app.app, drain_s=1.0, tls=tls), ready.set)
    task = asyncio.create_task(running.serve(sockets=[listener]))
    try:
        await ready.wait()
        base = "http://127.0.0.1" if tls is None else "https://localhost"
        yield running, f"{base}:{listener.getsockname()[1]}"
    finally:
        running.should_exit = True
        await task


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(0.01)


def events(body: str) -> list[dict[str, Any]]:
    """The JSON events of a stream; asserts that it is well formed and ends in [DONE]."""
    lines = [line for line in body.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(stream: list[dict[str, Any]], index: int = 0) -> str:
    """What a client puts together for one choice."""
    choices = [choice for event in stream for choice in event.get("choices", ()) if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def run(setup: AbstractAsyncContextManager[Setup], scenario: Callable[[Setup], Coroutine[Any, Any, None]]) -> None:
    """Runs the scenario and then checks that nothing is left: no request, no task, no account."""

    async def main() -> None:
        async with setup as entered:
            await scenario(entered)
            service = entered.gateway.service
            await eventually(lambda: not service.mailboxes)
            assert service.ledger.in_flight == {}
            assert all(session.num_requests == 0 for session in entered.gateway.pool.sessions.values())
            assert entered.metric("num_requests_running") == 0
        me = asyncio.current_task()
        await eventually(lambda: asyncio.all_tasks() == {me})

    asyncio.run(main())
