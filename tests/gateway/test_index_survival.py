"""A real Redis that hangs, answers late or is gone under a gateway: each request is answered, and few of them wait.

The gateway's clock stands still, so what counts is how often the index is asked, not how long anything takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.common.hashing import block_names, root_name
from kvferry.services.gateway.lookup import INDEX_PAUSE_S, PrefixLookup
from kvferry.services.index.open import open_index
from tests.gateway.fake_decode import CARD, FakeDecode
from tests.gateway.harness import Setup, gateway
from tests.gateway.test_nodes import Clock
from tests.index.servers import RedisServer, binaries, late_proxy

PROMPT = [20] * 64
NAMES = block_names(root_name(CARD.model_fingerprint, CARD.numerics_id), PROMPT, CARD.block_size)
TIMEOUT_S = 0.3  # of a lookup: enough for a healthy one on a slow machine


@dataclass
class Survivor:
    setup: Setup
    server: RedisServer
    clock: Clock
    delay_s: float = 0.0

    async def heartbeat(self) -> None:
        (node,) = self.setup.nodes
        if await self.setup.index.announce(node.record(), 60):
            await self.setup.index.store(node.instance_id, NAMES)

    async def matched(self, num_requests: int) -> set[str]:
        """How many blocks each of these requests, one after the other, found; all are answered."""
        found = set()
        for _ in range(num_requests):
            answer = await self.setup.complete(PROMPT, max_tokens=1)
            assert answer.status_code == 200, answer.text
            found.add(dict(part.split("=") for part in answer.headers["x-kvferry-route"].split())["matched"])
        return found

    @property
    def num_failures(self) -> int:
        return int(self.setup.metric("index_lookup_failures_total"))


@asynccontextmanager
async def survivor(folder: Path) -> AsyncIterator[Survivor]:
    server, made = RedisServer(binaries()["bundled"], folder), []
    try:
        async with late_proxy(server.socket, lambda: made[0].delay_s if made else 0.0) as url:
            index = open_index(url, timeout_s=3600)  # what bounds a request's wait is the lookup's own limit alone
            async with gateway(FakeDecode(), index=index) as setup:
                made.append(Survivor(setup, server, Clock()))
                setup.gateway.service.lookup = PrefixLookup(index, TIMEOUT_S, setup.gateway.metrics, made[0].clock)
                await index.store(setup.nodes[0].instance_id, NAMES)
                yield made[0]
            await index.aclose()
    finally:
        server.stop()


@asynccontextmanager
async def hangs(it: Survivor) -> AsyncIterator[None]:
    with it.server.frozen():
        yield


@asynccontextmanager
async def is_late(it: Survivor) -> AsyncIterator[None]:
    it.delay_s = 3600.0
    yield
    it.delay_s = 0.0


@asynccontextmanager
async def is_gone(it: Survivor) -> AsyncIterator[None]:
    it.server.stop()
    yield
    it.server.start()


@pytest.mark.parametrize("trouble", [hangs, is_late, is_gone])
def test_one_request_a_second_waits_for_a_redis_in_trouble_and_all_are_answered(trouble, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(60), survivor(tmp_path) as it:
            assert await it.matched(2) == {"3"}
            async with trouble(it):
                for second in range(3):
                    assert await it.matched(20) == {"0"}
                    assert it.num_failures == second + 1, "the others have waited, too"
                    it.clock.now += INDEX_PAUSE_S
            await it.heartbeat()
            assert await it.matched(2) == {"3"}
            assert it.num_failures == 3

    asyncio.run(scenario())


def test_a_slow_redis_that_answers_within_the_limit_is_used(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with survivor(tmp_path) as it:
            it.delay_s = TIMEOUT_S / 10
            assert await it.matched(5) == {"3"}
            assert it.num_failures == 0

    asyncio.run(scenario())
