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

            async def ask(max_tokens: int) -> str:
                body = {"prompt": "Hello", "stream": True, "max_tokens": max_tokens}
                return (await client.post("/v1/completions", json=body)).text

            short, long = asyncio.create_task(ask(30)), asyncio.create_task(ask(500))
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.3)
            async with httpx.AsyncClient(base_url=url) as other:
                with pytest.raises(httpx.ConnectError):
                    await other.get("/health")
            finished = events(await short)
            assert finished[-1]["choices"][0]["finish_reason"] == "length"
            broken = events(await long)
            assert broken[-1]["error"]["code"] == "draining"
            assert text_of(broken).startswith(text_of(finished))
            assert await asyncio.wait_for(process.wait(), 10) == 0

    asyncio.run(scenario())


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
