"""The gateway as a process: what stops it from starting, and how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvferry.common.config import load_config
from kvferry.common.errors import ConfigError, ModelLoadError
from kvferry.services.gateway.app import serve
from tests.gateway.harness import events, text_of
from tests.gateway.tiny_tokenizer import write_tokenizer

_MAIN = """
import sys
from kvferry.common.config import load_config
from kvferry.services.gateway.app import main
sys.exit(main(load_config({"model": sys.argv[1], "redis_url": "memory://", "port": 0}, environ={})))
"""

# The same, with a decode node in the process: 30 tokens take 0.6 s, 500 tokens 10 s; the grace period is 3 s.
_WITH_NODE = """
import asyncio, sys
import uvloop
from kvferry.common.config import load_config
from kvferry.common.log import setup_logging
from kvferry.services.gateway import app
from kvferry.services.index.memory import MemoryIndex
from tests.gateway.fake_decode import Behaviour, FakeDecode

async def main():
    index = MemoryIndex()
    app.open_index = lambda *_: index
    flags = {"model": sys.argv[1], "redis_url": "memory://", "port": 0, "drain_s": 3.0}
    async with FakeDecode(Behaviour(step_s=0.02), model=sys.argv[1]) as node:
        await index.announce(node.record(), 60)
        await app.serve(load_config(flags, environ={}))

setup_logging()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


# Its node gives as many tokens as the last digit of what is asked for, and then none. It is gone as soon as the gateway
# drains; another one comes when the gateway has looked for nodes three times more.
_NODE_IS_REPLACED = """
import asyncio, sys
from dataclasses import replace
import uvloop
from kvferry.common.config import load_config
from kvferry.common.log import setup_logging
from kvferry.services.gateway import app
from kvferry.services.index.memory import MemoryIndex
from tests.gateway.fake_decode import FakeDecode

class Stuck(FakeDecode):
    async def _answer(self, request, replies, does):
        await super()._answer(request, replies, replace(does, hang_after=request.sampling.max_tokens % 10))

class Asked(MemoryIndex):
    looks = asyncio.Semaphore(0)

    async def nodes(self):
        self.looks.release()
        return await super().nodes()

async def main():
    index, drains, drain = Asked(), asyncio.Event(), app.Gateway.drain
    app.POLL_S = 0.05
    app.open_index = lambda *_: index
    app.Gateway.drain = lambda gateway: (drain(gateway), drains.set())
    flags = {"model": sys.argv[1], "redis_url": "memory://", "port": 0, "drain_s": 15.0}
    async with Stuck(model=sys.argv[1]) as node, FakeDecode(node_id="d1", model=sys.argv[1]) as successor:
        await index.announce(node.record(), 60)

        async def replace_it():
            await drains.wait()
            await index.withdraw(node.instance_id)
            await node.stop()
            index.looks = asyncio.Semaphore(0)
            for _ in range(3):
                await index.looks.acquire()
            await index.announce(successor.record(), 60)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(replace_it())
            await app.serve(load_config(flags, environ={}))

setup_logging()
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


@asynccontextmanager
async def started(script: str, folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    write_tokenizer(folder)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(folder), stderr=asyncio.subprocess.PIPE, env=environ
    )
    try:
        assert process.stderr is not None
        while line := (await asyncio.wait_for(process.stderr.readline(), 30)).decode():
            if found := re.search(r"gateway ready on (http://\S+)", line):
                yield process, found[1]
                break
        else:
            raise AssertionError("the gateway ended before it was ready")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def test_it_waits_for_nodes_and_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(_MAIN, tmp_path) as (process, url):
            async with httpx.AsyncClient(base_url=url) as client:
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/ready")).status_code == 503
                assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 503
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10) == 0

    asyncio.run(scenario())


def test_sigterm_lets_requests_finish_within_the_grace_period_and_ends_the_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            started(_WITH_NODE, tmp_path) as (process, url),
            httpx.AsyncClient(base_url=url, timeout=20) as client,
        ):
            short, long = Stream(client, 30), Stream(client, 500)
            for stream in (short, long):
                await stream.begun.wait()
            process.send_signal(signal.SIGTERM)
            await refuses(url)
            finished = events(await short.body)
            assert finished[-2]["choices"][0]["finish_reason"] == "length"
            broken = events(await long.body)
            assert broken[-1]["error"]["code"] == "draining"
            assert text_of(broken).startswith(text_of(finished))
            assert await asyncio.wait_for(process.wait(), 10) == 0

    asyncio.run(scenario())


def test_while_it_drains_what_runs_and_what_waits_for_its_first_token_go_on_at_a_node_that_comes_then(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with (
            started(_NODE_IS_REPLACED, tmp_path) as (process, url),
            httpx.AsyncClient(base_url=url, timeout=60) as client,
        ):
            running = Stream(client, 43)
            await running.begun.wait()
            waiting = Stream(client, 40)
            while "kvferry:num_requests_running 2.0" not in (await client.get("/metrics")).text:
                pass
            assert not waiting.begun.is_set()
            process.send_signal(signal.SIGTERM)
            for stream, num_tokens in ((running, 43), (waiting, 40)):
                *_, usage = events(await stream.body)
                assert usage.get("usage", {}).get("completion_tokens") == num_tokens, usage
            assert await asyncio.wait_for(process.wait(), 30) == 0

    asyncio.run(scenario())


class Stream:
    """A stream that is read as it comes. `begun`: with its first event."""

    def __init__(self, client: httpx.AsyncClient, max_tokens: int) -> None:
        self.begun = asyncio.Event()
        self.body = asyncio.create_task(self._read(client, max_tokens))

    async def _read(self, client: httpx.AsyncClient, max_tokens: int) -> str:
        body = {"prompt": "Hello", "stream": True, "max_tokens": max_tokens, "stream_options": {"include_usage": True}}
        read = ""
        async with client.stream("POST", "/v1/completions", json=body) as reply:
            async for text in reply.aiter_text():
                read += text
                self.begun.set()
        return read


async def refuses(url: str) -> None:
    """Until new connections are refused."""
    async with asyncio.timeout(30):
        while True:
            try:
                async with httpx.AsyncClient(base_url=url) as other:
                    await other.get("/health")
            except httpx.ConnectError:
                return
            except httpx.ReadError:
                pass  # it was taken, and then the listener was closed


def refusal(folder: Path, **flags: object) -> str:
    with pytest.raises((ConfigError, ModelLoadError)) as caught:
        asyncio.run(serve(load_config({"model": str(folder), "port": 0} | flags, environ={})))
    return caught.value.message


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refusal(tmp_path, redis_url="memory://", port=port)
    assert f"127.0.0.1:{port}" in message
    assert "is the port in use?" in message


def test_an_unreachable_redis_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    assert "redis://127.0.0.1:1" in refusal(tmp_path, redis_url="redis://127.0.0.1:1")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert "--redis-url" in refusal(tmp_path)
    assert "config.json" in refusal(tmp_path, redis_url="memory://")
    assert "cannot listen on no.such.host.invalid" in refusal(
        tmp_path, redis_url="memory://", host="no.such.host.invalid"
    )
