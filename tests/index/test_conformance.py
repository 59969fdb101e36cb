from __future__ import annotations

import asyncio
import itertools

import pytest

from kvferry.services.index.memory import MemoryIndex
from kvferry.services.index.redis import RedisIndex
from tests.index.conformance import CHECKS

_numbers = itertools.count()
each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))


@each_check
def test_memory_index(check):
    index = MemoryIndex()
    asyncio.run(check(lambda: index))


@each_check
def test_redis_index(check, redis_server):
    async def run() -> None:
        namespace, opened = f"conformance-{next(_numbers)}", []

        def connect() -> RedisIndex:
            opened.append(RedisIndex(redis_server.url, namespace, timeout_s=20))
            return opened[-1]

        try:
            await check(connect)
        finally:
            for index in opened:
                await index.aclose()

    asyncio.run(run())
