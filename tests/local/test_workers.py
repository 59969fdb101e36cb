"""`kvferry gateway --workers 2` as it is started by users: one port, two processes, one set of numbers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from kvferry.services.index.open import open_index
from kvferry.services.local.plan import free_ports
from kvferry.services.local.workers import FOLDER_PREFIX, counts_folder
from tests.e2e.cluster import metric_sum
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import events
from tests.gateway.tiny_tokenizer import write_tokenizer
from tests.index.servers import RedisServer, binaries
from tests.local.processes import alive, environ_without_kvferry, wait_until

PATIENCE_S = 60.0


class Gateway:
    """Every call has a connection of its own, so that any worker may answer it."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self._url = url

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._url, timeout=20) as client:
            return await client.get(path)

    async def complete(self, **fields: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self._url, timeout=20) as client:
            return await client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 3, **fields})

    async def pids(self) -> set[int]:
        """Of the workers that answer a handful of calls at once."""
        answers = await asyncio.gather(*(self.get("/cluster") for _ in range(16)))
        assert {answer.json()["worker"]["num_workers"] for answer in answers} == {2}
        return {answer.json()["worker"]["pid"] for answer in answers}

    async def two_pids(self, but: int = 0) -> set[int]:
        seen: set[int] = set()
        async with asyncio.timeout(PATIENCE_S):
            while len(seen) < 2:
                seen |= await self.pids() - {but}
        return seen

    async def metric(self, name: str, **labels: str) -> float:
        return metric_sum((await self.get("/metrics")).text, f"kvferry:{name}", **labels)

    async def until_running(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.metric("num_requests_running") != number:  # noqa: ASYNC110  (another process: no event)
                await asyncio.sleep(0.05)


@asynccontextmanager
async def started(folder: Path, node: FakeDecode) -> AsyncIterator[Gateway]:
    redis = RedisServer(binaries()["bundled"], folder)
    (port,) = free_ports("127.0.0.1", 1)
    index = open_index(redis.url, "kvferry")
    command = [sys.executable, "-m", "kvferry.services.local.cli", "gateway", "--workers", "2", "--port", str(port)]
    command += ["--model", str(folder), "--served-model-name", "tiny", "--redis-url", redis.url]
    try:
        await index.announce(node.record(), 600)
        process = await asyncio.create_subprocess_exec(
            *command, env=environ_without_kvferry() | {"TMPDIR": str(folder / "tmp")}
        )
        try:
            gateway = Gateway(process, f"http://127.0.0.1:{port}")
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        assert (await gateway.get("/ready")).status_code == 200
                        break
                    except (httpx.ConnectError, httpx.ReadTimeout):
                        assert process.returncode is None
                        await asyncio.sleep(0.1)
            yield gateway
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    finally:
        await index.aclose()
        redis.stop()


def test_a_killed_worker_is_replaced_and_its_counts_stay_in_the_sums(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tmp").mkdir()

    async def scenario() -> None:
        async with FakeDecode(Behaviour(step_s=0.02)) as node, started(tmp_path, node) as gateway:
            first, second = await gateway.two_pids()
            assert gateway.process.pid not in (first, second)
            replies = await asyncio.gather(*(gateway.complete() for _ in range(20)))
            assert [reply.status_code for reply in replies] == [200] * 20
            assert node.num_sessions == 2, "both have worked"
            assert await gateway.metric("generation_tokens_total") == 60
            assert await gateway.metric("e2e_request_latency_seconds_count") == 20

            lost = [asyncio.create_task(gateway.complete(max_tokens=500)) for _ in range(8)]
            await gateway.until_running(8)
            os.kill(first, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: not alive(first))
            replies = await asyncio.gather(*(gateway.complete() for _ in range(5)))
            assert [reply.status_code for reply in replies] == [200] * 5
            third = (await gateway.two_pids(but=first) - {second}).pop()
            assert alive(second), "nobody else was touched"
            assert third != first
            files = [path.name for path in (tmp_path / "tmp").glob("*/counter_*")]
            assert sorted(files) == ["counter_0.db", "counter_1.db"], "one process after the other counts in one file"
            for task in lost:
                task.cancel()
            await asyncio.gather(*lost, return_exceptions=True)
            await gateway.until_running(0)
            assert await gateway.metric("request_success_total", finished_reason="length") == 25
            assert await gateway.metric("index_up") == 1

            body = {"prompt": "Hello", "stream": True, "max_tokens": 500}
            streams = [asyncio.create_task(gateway.complete(**body)) for _ in range(4)]
            await gateway.until_running(4)
            gateway.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                while await listens(gateway):  # noqa: ASYNC110  (another process: no event)
                    await asyncio.sleep(0.05)
            assert not any(stream.done() for stream in streams), "a drain lets them go on"
            gateway.process.send_signal(signal.SIGTERM)
            for reply in await asyncio.gather(*streams):
                assert events(reply.text)[-1]["error"]["code"] == "draining"
            async with asyncio.timeout(PATIENCE_S):
                assert await gateway.process.wait() == 0
            assert not alive(second)
            assert not alive(third)
            assert list((tmp_path / "tmp").iterdir()) == [], "the folder of counts is gone"

    asyncio.run(scenario())


async def listens(gateway: Gateway) -> bool:
    """Whether the port still is."""
    try:
        await gateway.get("/health")
    except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):  # or taken just before, by nobody
        return False
    return True


def test_folders_of_counts_that_killed_gateways_left_are_removed_and_others_are_not(tmp_path: Path) -> None:
    with counts_folder(tmp_path) as living:
        left, fresh = tmp_path / f"{FOLDER_PREFIX}left", tmp_path / f"{FOLDER_PREFIX}fresh"
        for folder in (left, fresh):
            folder.mkdir()
            (folder / "counter_0.db").touch()
        for folder in (left, Path(living)):
            os.utime(folder, (0, 0))
        with counts_folder(tmp_path) as another:
            assert set(tmp_path.iterdir()) == {Path(living), Path(another), fresh}
    assert [*tmp_path.iterdir()] == [fresh]


def test_what_the_operator_must_mend_ends_all_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        command = (sys.executable, "-m", "kvferry.services.local.cli", "gateway", "--workers", "2", "--port", "0")
        process = await asyncio.create_subprocess_exec(
            *(*command, "--redis-url", "memory://", "--model", str(tmp_path)),
            env=environ_without_kvferry(),
            stderr=asyncio.subprocess.PIPE,
        )
        _, err = await asyncio.wait_for(process.communicate(), PATIENCE_S)
        assert process.returncode == 2
        assert "has no config.json" in err.decode()

    asyncio.run(scenario())
