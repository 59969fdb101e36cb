"""Updates that are lost, late, repeated or out of order, and a Redis that forgets: in the end the Redis index answers
what the memory index does, which got every update once and in order.
"""

from __future__ import annotations

import asyncio
import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index.memory import MemoryIndex
from kvferry.services.index.redis import RedisIndex
from kvferry.services.index.scripts import REMOVE, STORE
from tests.index.conformance import TTL_S, chain, node

_numbers = itertools.count()
NAMES = chain(12)
INSTANCES = ("a", "b")
_held = st.tuples(st.just("hold"), st.sampled_from(INSTANCES), st.integers(0, 12))
_steps = st.lists(
    st.one_of(
        _held,
        _held,
        st.tuples(st.just("wire"), st.sampled_from(["passes", "loses the call", "loses the answer"])),
        st.tuples(st.just("late"), st.integers(0, 5)),
        st.tuples(st.just("announce"), st.sampled_from(INSTANCES)),
        st.tuples(st.just("flush")),
        st.tuples(st.just("forget"), st.sampled_from(INSTANCES)),
    ),
    max_size=30,
)


class Wire:
    """What is between the index and its Redis: everything sent is kept, and may arrive again at any time."""

    def __init__(self, wire) -> None:
        self._wire = wire
        self.where = wire.where
        self.does = "passes"
        self.seen: list[tuple] = []

    async def send(self, commands):
        update = commands[0][0] == "EVALSHA" and commands[0][1] in (STORE.sha, REMOVE.sha)
        if update:
            self.seen.append(commands)
        if not update or self.does == "passes":
            return await self._wire.send(commands)
        if self.does == "loses the answer":
            await self._wire.send(commands)
        raise IndexUnavailable(self.does)

    async def late(self, which: int) -> None:
        if self.seen:
            await self._wire.send(self.seen[-1 - which % len(self.seen)])

    async def aclose(self) -> None:
        await self._wire.aclose()


class Node:
    """What a membership does: what failed is given again, and everything after an announce that says so."""

    def __init__(self, instance: str, index: RedisIndex) -> None:
        self.instance = instance
        self.num_held = 0
        self._index = index
        self._dirty = True

    async def hold(self, num_blocks: int) -> None:
        self.num_held, self._dirty = num_blocks, True
        await self.publish()

    async def publish(self) -> None:
        try:
            await self._index.remove(self.instance, NAMES[self.num_held :])
            await self._index.store(self.instance, NAMES[: self.num_held])
        except IndexUnavailable:
            return
        self._dirty = False

    async def announce(self) -> None:
        if await self._index.announce(node(self.instance), TTL_S) or self._dirty:
            await self.publish()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps)
def test_whatever_the_wire_does_the_answers_are_right_after_one_heartbeat(redis_server, steps):
    async def run() -> None:
        namespace = f"turns-{next(_numbers)}"
        index = RedisIndex(redis_server.url, namespace, timeout_s=20)
        wire = index._wire = Wire(index._wire)
        nodes = {name: Node(name, index) for name in INSTANCES}
        memory = MemoryIndex()
        try:
            for each in nodes.values():
                await each.announce()
                await memory.announce(node(each.instance), TTL_S)
            for step in steps:
                match step:
                    case ("hold", name, num_blocks):
                        await nodes[name].hold(num_blocks)
                    case ("wire", does):
                        wire.does = does
                    case ("late", which):
                        await wire.late(which)
                    case ("announce", name):
                        await nodes[name].announce()
                    case ("forget", name):  # by Redis, as if evicted
                        for key in redis_server.admin.scan_iter(f"{namespace}:at:*"):
                            redis_server.admin.delete(key)
                    case ("flush",):
                        redis_server.admin.flushall()
            wire.does = "passes"
            for each in nodes.values():
                await each.publish()
                await each.announce()
                await memory.store(each.instance, NAMES[: each.num_held])
            for which in range(len(wire.seen)):
                await wire.late(which)
            assert await index.match(NAMES) == await memory.match(NAMES)
        finally:
            await index.aclose()

    asyncio.run(run())


def test_a_late_update_of_a_replaced_instance_changes_nothing(redis_server):
    async def run() -> None:
        old = RedisIndex(redis_server.url, f"turns-{next(_numbers)}", timeout_s=20)
        new = RedisIndex(redis_server.url, f"turns-{next(_numbers) - 1}", timeout_s=20)
        wire = old._wire = Wire(old._wire)
        try:
            await old.announce(node("old", "n"), TTL_S)
            await old.store("old", NAMES)
            await new.announce(node("new", "n"), TTL_S)
            await new.store("new", NAMES[:5])
            await wire.late(0)
            await old.remove("old", NAMES[2:])
            assert (await new.match(NAMES)).held == {"new": 5}
        finally:
            await old.aclose()
            await new.aclose()

    asyncio.run(run())


def test_blocks_that_many_have_held_are_freed_of_the_dead(redis_server):
    async def run() -> None:
        namespace = f"turns-{next(_numbers)}"
        index = RedisIndex(redis_server.url, namespace, timeout_s=20)
        try:
            for life in range(12):
                await index.announce(node(f"a{life}", "a"), TTL_S)
                await index.store(f"a{life}", NAMES[:1])
            await index.announce(node("b"), TTL_S)
            await index.store("b", NAMES[:1])
            (key,) = redis_server.admin.scan_iter(f"{namespace}:b:*")
            assert len(redis_server.admin.get(key)) == 4 * 13
            assert (await index.match(NAMES[:1])).held == {"a11": 1, "b": 1}
            await index.clearing  # behind the lookup
            assert len(redis_server.admin.get(key)) == 4 * 2
            assert (await index.match(NAMES[:1])).held == {"a11": 1, "b": 1}
        finally:
            await index.aclose()

    asyncio.run(run())
