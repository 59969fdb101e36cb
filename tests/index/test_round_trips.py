"""A lookup is one round trip, however long the prompt and however many the nodes, and what is cleared behind it holds
Redis up for as long as a few lookups do, not longer.
"""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
from prometheus_client import CollectorRegistry

from kvferry.services.gateway.lookup import PrefixLookup
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.index import redis as redis_index
from kvferry.services.index import runs
from kvferry.services.index.keys import MAX_READ
from kvferry.services.index.redis import MAX_PRUNED_HOLDERS, RedisIndex
from kvferry.services.index.scripts import PRUNE
from tests.index.conformance import TTL_S, chain, node

_numbers = itertools.count()
NUM_NODES = 1024
NUM_BLOCKS = 8192  # 128k tokens


class CountingWire:
    """Hands no reply out before all that has been sent is answered: what is sent at once is one round trip."""

    def __init__(self, wire) -> None:
        self._wire = wire
        self._num_open = 0
        self._answered = asyncio.Event()
        self.where = wire.where
        self.num_round_trips = 0
        self.sent: list[tuple] = []
        self.replies: list = []

    async def send(self, commands):
        self.sent += commands
        self._num_open += 1
        try:
            replies = await self._wire.send(commands)
        finally:
            self._num_open -= 1
        self.replies += replies
        answered = self._answered
        if self._num_open:
            await answered.wait()
        else:
            self.num_round_trips += 1
            self._answered = asyncio.Event()
            answered.set()
        return replies

    async def aclose(self) -> None:
        await self._wire.aclose()


class Fleet:
    """`num_nodes` live nodes and a lookup whose round trips are counted."""

    def __init__(self, server, num_nodes: int) -> None:
        self.admin = server.admin
        self.namespace = f"trips-{next(_numbers)}"
        self.nodes = RedisIndex(server.url, self.namespace, timeout_s=60)
        self.asker = RedisIndex(server.url, self.namespace, timeout_s=60)
        self.wire = self.asker._wire = CountingWire(self.asker._wire)
        self.names = [f"i{number}" for number in range(num_nodes)]

    async def __aenter__(self):
        await asyncio.gather(*(self.nodes.announce(node(name), TTL_S) for name in self.names))
        await self.asker.match(chain(1))  # which loads the scripts
        self.wire.num_round_trips = 0
        return self

    async def __aexit__(self, *_) -> None:
        await self.asker.aclose()
        await self.nodes.aclose()

    def number(self, name: str) -> int:
        return self.nodes._writers[name].number

    def write(self, names, held: dict[int, int]) -> None:
        """As if each of these numbers had stored as many leading blocks."""
        pipe = self.admin.pipeline(transaction=False)
        for i, name in enumerate(names):
            holders = b"".join(runs.packed(number) for number in sorted(held) if held[number] > i)
            if holders:
                pipe.set(f"{self.namespace}:b:".encode() + name, holders, ex=600)
        pipe.execute()

    async def pruned(self) -> None:
        while (task := self.asker.clearing) is not None:
            await task


def test_a_lookup_is_one_round_trip_for_128k_tokens_and_1024_nodes(redis_server, monkeypatch):
    async def run() -> None:
        async with Fleet(redis_server, NUM_NODES) as fleet:
            names, rng = chain(NUM_BLOCKS), random.Random(1)
            lengths = [0, NUM_BLOCKS, *(rng.randrange(NUM_BLOCKS) for _ in range(5))]
            held = {name: rng.choice(lengths) for name in fleet.names}
            fleet.write(names, {fleet.number(name): count for name, count in held.items()})

            async def ask(num_blocks: int) -> None:
                expected = {name: min(count, num_blocks) for name, count in held.items() if min(count, num_blocks)}
                before = fleet.wire.num_round_trips
                assert (await fleet.asker.match(names[:num_blocks])).held == expected
                assert fleet.wire.num_round_trips - before == 1

            for num_blocks in (1, 2000, NUM_BLOCKS):
                await ask(num_blocks)
            await fleet.nodes.withdraw(fleet.names[0])
            del held[fleet.names[0]]
            await ask(NUM_BLOCKS)
            monkeypatch.setattr(redis_index, "MAX_AGE_S", -1.0)  # time to see who fell silent
            redis_server.admin.delete(f"{{{fleet.namespace}}}:node:node-{fleet.names[1]}")
            del held[fleet.names[1]]
            await ask(NUM_BLOCKS)

    asyncio.run(run())


def test_where_every_node_holds_another_length_few_blocks_are_read_and_nobody_is_said_to_hold_more(redis_server):
    async def run() -> None:
        async with Fleet(redis_server, 200) as fleet:
            names, rng = chain(NUM_BLOCKS), random.Random(1)
            held = {name: rng.randrange(1, NUM_BLOCKS + 1) for name in fleet.names}
            fleet.write(names, {fleet.number(name): count for name, count in held.items()})
            fleet.wire.replies.clear()
            found = (await fleet.asker.match(names)).held
            (holders,) = (reply[1::2] for reply in fleet.wire.replies if reply and reply[0] == 0)
            assert len(holders) <= MAX_READ + 1
            assert found.keys() == held.keys()
            assert all(0 <= held[name] - found[name] <= NUM_BLOCKS // 64 for name in held)

    asyncio.run(run())


def test_both_names_of_a_prompt_are_looked_up_in_one_round_trip(redis_server):
    async def run() -> None:
        async with Fleet(redis_server, 2) as fleet:
            old, new = chain(20, salt="old version"), chain(20, salt="new version")
            fleet.write(old, {fleet.number("i0"): 20})
            fleet.write(new, {fleet.number("i1"): 7})
            lookup = PrefixLookup(fleet.asker, 60, GatewayMetrics(CollectorRegistry()))
            assert (await lookup.match([old, new, []])).held == {"i0": 20, "i1": 7}
            assert fleet.wire.num_round_trips == 1

    asyncio.run(run())


@pytest.mark.parametrize("num_dead", [20, 1500])
def test_dead_holders_are_cleared_behind_the_lookup_and_redis_is_never_held_up_for_long(redis_server, num_dead):
    async def run() -> None:
        async with Fleet(redis_server, 1) as fleet:
            names, live = chain(64), fleet.number("i0")
            dead = [live - 1 - number for number in range(num_dead)]
            fleet.write(names, {number: 64 - i % 64 for i, number in enumerate(dead)} | {live: 64})
            before = [fleet.admin.strlen(f"{fleet.namespace}:b:".encode() + name) for name in names]
            assert (await fleet.asker.match(names)).held == {"i0": 64}
            assert fleet.wire.num_round_trips == 1, "the lookup has waited for the dead to be cleared"
            await fleet.pruned()
            assert fleet.admin.get(f"{fleet.namespace}:b:".encode() + names[0]) == runs.packed(live)
            calls = [command for command in fleet.wire.sent if command[:2] == ("EVALSHA", PRUNE.sha)]
            assert calls
            longest = max(before) // runs.HOLDER_BYTES
            assert max(command[2] for command in calls) <= max(1, MAX_PRUNED_HOLDERS // longest)

    asyncio.run(run())
