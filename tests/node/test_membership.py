"""A node and an index that is away for a while."""

from __future__ import annotations

import asyncio

from kvferry.common.errors import IndexUnavailable
from kvferry.services.engine.block_pool import NameChanges
from kvferry.services.index.memory import MemoryIndex
from kvferry.services.node.membership import Membership
from tests.index.conformance import chain, node

HEARTBEAT_S = 1.0


class AwayIndex(MemoryIndex):
    """A memory index that does not answer while `away`."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.num_refused = 0
        self.refused, self.stored = asyncio.Event(), asyncio.Event()

    async def announce(self, record, ttl_s):
        self._check()
        return await super().announce(record, ttl_s)

    async def store(self, instance_id, names):
        self._check()
        await super().store(instance_id, names)
        if names:
            self.stored.set()

    def _check(self) -> None:
        if self.away:
            self.num_refused += 1
            if self.num_refused == 4:
                self.refused.set()
            raise IndexUnavailable("away")


def test_a_node_that_was_known_announces_itself_every_heartbeat_however_long_the_index_is_away(monkeypatch) -> None:
    async def run() -> None:
        index, pauses = AwayIndex(), []
        real_sleep = asyncio.sleep

        async def sleep(seconds: float) -> None:
            pauses.append(seconds)
            await real_sleep(0)

        monkeypatch.setattr("kvferry.services.node.membership.asyncio.sleep", sleep)
        membership = Membership(index, HEARTBEAT_S, 5.0)
        task = asyncio.create_task(membership.renew(lambda: node("a"), list))
        await membership.registered.wait()
        index.away = True
        pauses.clear()
        while index.num_refused < 10:
            await real_sleep(0)
        task.cancel()
        assert set(pauses) == {HEARTBEAT_S}

    asyncio.run(run())


def test_changes_wait_for_the_index_and_arrive() -> None:
    async def run() -> None:
        index = AwayIndex()
        membership = Membership(index, 0.001, 30.0)
        tasks = [
            asyncio.create_task(membership.renew(lambda: node("a"), list)),
            asyncio.create_task(membership.publish_forever("a")),
        ]
        await membership.registered.wait()
        index.away = True
        membership.publish(NameChanges(chain(4), []))
        await index.refused.wait()
        index.away = False
        await index.stored.wait()
        assert (await index.match(chain(4))).held == {"a": 4}
        for task in tasks:
            task.cancel()

    asyncio.run(run())
