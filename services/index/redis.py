"""The prefix index in Redis (6.2 or later), alone or a cluster.

    {ns}:nodes           set of node ids
    {ns}:node:<id>       hash number, instance, record; expires with the node's lease
    {ns}:past:<id>       sorted set of the instances that ever had this node id, by number: the fence
    {ns}:number          counter that numbers the instances, and moves whenever one comes or leaves
    {ns}:memory          random; expires with the last lease, so that neither a flush nor an old copy leaves it in place
    ns:b:<block name>    its holders, packed as `runs.py` says; expires BLOCK_TTL_S after a store
    ns:at:<number>       how many updates of this instance have been applied
    ns:soon:<block name> prompts that begin so and have been sent to a node, packed as `expected.py` says: a sorted set
                         by when each is forgotten, in ms of Redis' own clock; expires with the last of them

In a cluster all but those in braces carry one of 16 tags, `ns:b:{tag}<name>`, by the name's first byte: see `keys.py`.

A node instance gets a number that is never used again, so everything a dead or replaced instance stored is dead with
its record, without touching a block. Its updates have turns, and one is applied only right after the one before: what
comes late or twice changes nothing, and where one is missing the instance begins anew with another number: `writer.py`.
A lookup is one round trip: by halving, in a script, the few blocks of the chain where the holders change. Who is alive
comes along where it has changed, and is asked again twice a second for those who fell silent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from kvferry.common.errors import IndexUnavailable, Unavailable
from kvferry.common.nodes import NodeRecord
from kvferry.services.index import expected, runs
from kvferry.services.index.base import Matches, Nodes
from kvferry.services.index.cluster_wire import ClusterWire
from kvferry.services.index.keys import Keys
from kvferry.services.index.scripts import ANNOUNCE, LIVE, PRUNE, SCRIPTS, WITHDRAW
from kvferry.services.index.wire import Command, RedisWire
from kvferry.services.index.writer import Writer

log = logging.getLogger("kvferry.index")

MAX_PRUNED = 256
"""Blocks that one lookup has freed of dead holders, behind it."""
MAX_PRUNED_HOLDERS = 2048
"""Of the blocks in one call: bounds how long it holds Redis up (about 1 ms)."""
MAX_AGE_S = 0.5
PATIENCE_SHARE = 0.05
"""Of the timeout, for each master of a cluster in a lookup: the others' answers are as good as all."""


class RedisIndex:
    """A `PrefixIndex`. Belongs to one event loop."""

    def __init__(
        self, url: str, namespace: str = "kvferry", *, timeout_s: float = 0.5, is_cluster: bool = False
    ) -> None:
        self._keys = Keys(namespace, is_cluster)
        self._wire = ClusterWire(url, timeout_s) if is_cluster else RedisWire(url, timeout_s)
        self._patience_s = timeout_s * PATIENCE_SHARE
        self._writers: dict[str, Writer] = {}  # of the instances announced through this object
        self._instances: dict[int, str] = {}  # live ones, by number, when asked for at `_counter`
        self._counter = b""
        self._asked_at = float("-inf")
        self.clearing: asyncio.Task[None] | None = None
        """Dead holders are being taken out, behind a lookup."""

    async def announce(self, record: NodeRecord, ttl_s: float) -> bool:
        writer = self._writers.get(record.instance_id)
        if writer is not None and not writer.lost:
            number, fresh = await self._announce(record, ttl_s, writer)
            if number == writer.number and not writer.lost:
                return fresh
        number, fresh = await self._announce(record, ttl_s, None, anew=writer is not None and writer.lost)
        if writer is None or number != writer.number:
            self._writers[record.instance_id] = Writer(number, self._keys)
        return fresh or writer is not None

    async def _announce(
        self, record: NodeRecord, ttl_s: float, writer: Writer | None, *, anew: bool = False
    ) -> tuple[int, bool]:
        """The instance's number, and whether it is new. Tells `writer` what Redis has of its updates."""
        keys = self._keys
        expected = writer.acknowledged() if writer else {}
        calls = [(tag, ("GET", keys.at(tag, writer.number))) for tag in expected] if writer else []
        node, past = keys.node_prefix + record.node_id, keys.past_prefix + record.node_id
        command = ANNOUNCE.call(
            (keys.nodes, node, past, keys.number, keys.memory),
            *(record.node_id, record.instance_id, record.to_json(), max(1, round(ttl_s * 1000))),
            # After a flush numbers start somewhere else, so that none comes twice, and the memory is another one.
            *(secrets.randbelow(2**29), int(anew)),
        )
        reply, *turns = await self._ask_each((keys.node_tag, command), *calls)
        number, fresh = _raised(reply)
        if not number:
            raise Unavailable(f"node {record.node_id}: a newer instance has taken over from {record.instance_id}")
        if writer:
            for turn, known in zip(turns, expected.values(), strict=True):
                writer.lost |= not isinstance(turn, Exception) and int(turn or 0) < known
        return number, bool(fresh)

    async def withdraw(self, instance_id: str) -> None:
        self._writers.pop(instance_id, None)
        await self._ask_nodes(WITHDRAW.call((self._keys.nodes, self._keys.number), self._keys.node_prefix, instance_id))

    async def nodes(self) -> Nodes:
        keys = self._keys
        calls = (self._live("record"), ("GET", keys.memory))  # in this order: a flush between them changes the memory
        reply, memory = map(_raised, await self._ask_each(*((keys.node_tag, call) for call in calls)))
        records = []
        for raw in reply[2::2]:
            try:
                records.append(NodeRecord.from_json(raw))
            except ValueError as exc:
                log.warning("a node of another version is in the index and is left out: %s", exc)
        return Nodes(sorted(records, key=lambda record: record.node_id), memory or b"")

    async def store(self, instance_id: str, names: Sequence[bytes]) -> None:
        if writer := self._writers.get(instance_id):
            await writer.store(names, self._ask_each)

    async def remove(self, instance_id: str, names: Sequence[bytes]) -> None:
        if writer := self._writers.get(instance_id):
            await writer.remove(names, self._ask_each)

    async def expect(self, instance_id: str, names: Sequence[bytes], ttl_s: float) -> None:
        if names:
            (reply,) = await self._ask_each(self._keys.expect(names[0], expected.packed(instance_id, names), ttl_s))
            _raised(reply)

    async def match(self, names: Sequence[bytes]) -> Matches:
        """Where a part of a cluster is away, its blocks count as held by whoever holds a later one of the chain."""
        if not names:
            return Matches({}, {})
        keys = self._keys
        places = keys.by_tag(names)
        reads = [(tag, keys.match(tag, [names[i] for i in found])) for tag, found in places.items()]
        is_due = time.monotonic() - self._asked_at > MAX_AGE_S
        if is_due:
            self._asked_at = time.monotonic()  # of many callers one asks: for many nodes it takes a while
        live = (keys.node_tag, self._live("instance", *(() if is_due else (self._counter,))))
        changed, prompts, *replies = await self._ask_each(
            live, keys.expected(names[0]), *reads, patience_s=self._patience_s
        )
        if all(isinstance(reply, Exception) for reply in replies):
            _raised(replies[0])
        self._update_instances(changed, is_due)
        holders = sorted(
            (found[i], value)
            for found, reply in zip(places.values(), replies, strict=True)
            if not isinstance(reply, Exception)
            for i, value in zip(reply[::2], reply[1::2], strict=True)
        )
        if self.clearing is None and (crowded := runs.crowded(holders, set(self._instances))[:MAX_PRUNED]):
            num_holders = max(len(value) for _, value in holders) // runs.HOLDER_BYTES
            chosen = [names[i] for i in crowded]
            self.clearing = asyncio.create_task(self._prune(chosen, num_holders))  # nobody waits for it
        held = {self._instances[number]: run for number, run in runs.leading(holders, self._instances).items()}
        if isinstance(prompts, Exception) or not prompts:
            return Matches(held, {})
        return Matches(held, expected.coming(prompts, names, set(self._instances.values())))

    def _update_instances(self, changed: list[Any] | IndexUnavailable, is_due: bool) -> None:
        if isinstance(changed, IndexUnavailable):
            if not self._instances:
                raise changed
        elif is_due or changed[0] != self._counter:
            self._counter, *live = changed
            self._instances = {n: i.decode() for n, i in zip(live[::2], live[1::2], strict=True)}

    def _live(self, field: str, *known: bytes) -> Command:
        return LIVE.call((self._keys.nodes, self._keys.number), self._keys.node_prefix, field, *known)

    async def _prune(self, names: Sequence[bytes], num_holders: int) -> None:
        """Takes dead holders out of these blocks: those who are renewed again and again would gather them.
        `num_holders`: of one block, at most.
        """
        size = max(1, MAX_PRUNED_HOLDERS // num_holders)
        try:
            for start in range(0, len(names), size):
                batch = names[start : start + size]
                places = self._keys.by_tag(batch)
                await self._ask_each(*((tag, self._pruned(tag, batch, found)) for tag, found in places.items()))
        except IndexUnavailable as exc:
            log.debug("dead holders stay until another lookup meets them: %s", exc)
        finally:
            self.clearing = None

    def _pruned(self, tag: str, names: Sequence[bytes], chosen: Iterable[int]) -> Command:
        live = self._instances.keys()
        return PRUNE.call(self._keys.blocks(tag, (names[i] for i in chosen)), max(live, default=0), *live)

    async def aclose(self) -> None:
        if self.clearing is not None:
            self.clearing.cancel()
            await asyncio.gather(self.clearing, return_exceptions=True)
        await self._wire.aclose()

    async def _ask_nodes(self, command: Command) -> Any:
        return _raised((await self._ask_each((self._keys.node_tag, command)))[0])

    async def _ask_each(self, *calls: tuple[str, Command], patience_s: float | None = None) -> list[Any]:
        """Replies of one round trip (two when Redis has lost our scripts), an IndexUnavailable for one that failed.
        `patience_s`: for each master of a cluster; None: until the timeout.

        Raises IndexUnavailable when there is only one Redis and it does not answer.
        """
        replies = await self._send(calls, patience_s)
        lacking = [i for i, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if lacking:
            loads: list[tuple[str, Command]] = [
                (calls[i][0], ("SCRIPT", "LOAD", SCRIPTS[str(calls[i][1][1])].source)) for i in lacking
            ]
            again = await self._send([*loads, *(calls[i] for i in lacking)], patience_s)
            for i, reply in zip(lacking, again[len(loads) :], strict=True):
                replies[i] = reply
        return [
            IndexUnavailable(f"Redis at {self._wire.where}: {reply}") if isinstance(reply, ResponseError) else reply
            for reply in replies
        ]

    async def _send(self, calls: Iterable[tuple[str, Command]], patience_s: float | None) -> list[Any]:
        tags, commands = zip(*calls, strict=True)
        if isinstance(self._wire, ClusterWire):
            return await self._wire.send(tags, commands, patience_s)
        return await self._wire.send(commands)


def _raised(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply
