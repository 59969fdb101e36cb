"""What can happen to Redis, one thing after the other, while requests run.

A trouble begins and ends with answers, not by the clock: each is there while some requests are, whatever the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager

import redis

from kvferry.services.index.runs import packed
from tests.e2e.cluster import Cluster, Node, Process

NAMESPACE = "kvferry"
ANSWERS_EACH = 5
ANSWERS_BETWEEN = 2
SLOW_S = 0.2
"""Beyond what a lookup waits, within what a node's announcement does."""


class Redis:
    """Redis of a cluster, by its process and by a client of its own."""

    def __init__(self, nodes: Cluster) -> None:
        self._process: Process = nodes.processes[0]
        assert self._process.name == "redis"
        self._client = redis.Redis.from_url(nodes.redis_url, socket_timeout=20)

    @contextlib.asynccontextmanager
    async def killed(self) -> AsyncIterator[None]:
        """And empty when it is back."""
        self._process.stop(signal.SIGKILL)
        yield
        self._process.start()

    @contextlib.asynccontextmanager
    async def restarted(self) -> AsyncIterator[None]:
        """It is back at once, and empty."""
        self._process.stop(signal.SIGKILL)
        self._process.start()
        yield

    @contextlib.asynccontextmanager
    async def hanging(self) -> AsyncIterator[None]:
        self._process.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send(signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def flushed(self) -> AsyncIterator[None]:
        self._client.flushall()
        yield

    @contextlib.asynccontextmanager
    async def slow(self) -> AsyncIterator[None]:
        """It executes nothing for `SLOW_S`, again and again."""

        async def pause() -> None:
            while True:
                self._client.client_pause(round(1000 * SLOW_S))
                await asyncio.sleep(1.5 * SLOW_S)

        pausing = asyncio.create_task(pause())
        try:
            yield
        finally:
            pausing.cancel()
            await asyncio.gather(pausing, return_exceptions=True)

    @property
    def troubles(self) -> Sequence[Callable[[], AbstractAsyncContextManager[None]]]:
        return (self.hanging, self.flushed, self.killed, self.slow, self.restarted)

    def num_told_by(self, node: Node) -> int:
        """Blocks that it says this node holds."""
        number = self._client.hget(f"{{{NAMESPACE}}}:node:{node.record().node_id}", "number")
        if number is None:
            return 0
        holder = packed(int(number))
        values = (self._client.get(key) or b"" for key in self._client.scan_iter(f"{NAMESPACE}:b:*", count=1000))
        return sum(holder in (value[at : at + 4] for at in range(0, len(value), 4)) for value in values)


class Answers:
    """How many there are. `end` is for those that wait when no more will come."""

    def __init__(self) -> None:
        self._count = 0
        self._changed = asyncio.Condition()
        self.has_ended = False

    async def add(self) -> None:
        async with self._changed:
            self._count += 1
            self._changed.notify_all()

    async def end(self) -> None:
        async with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    async def more(self, count: int) -> None:
        """Waits for `count` more."""
        async with self._changed:
            due = self._count + count
            await self._changed.wait_for(lambda: self._count >= due or self.has_ended)


async def trouble(nodes: Cluster, answers: Answers) -> list[str]:
    """One trouble after the other until there are no more answers; which there were."""
    met, redis_of = [], Redis(nodes)
    while True:
        for begin in redis_of.troubles:
            await answers.more(ANSWERS_BETWEEN)
            if answers.has_ended:
                return met
            async with begin():
                await answers.more(ANSWERS_EACH)
            met.append(begin.__name__)
