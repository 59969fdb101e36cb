"""A Redis Cluster: each command goes to the master of its slot, to all masters at once.

The map of slots is asked of any node that answers, again whenever a command went to the wrong node or a node failed.
What a node says is elsewhere (MOVED, ASK) is asked for there. Who has no time waits `patience_s` for all masters: one
that has not answered by then is not asked by him again until its answer has come, or `PAUSE_S` have passed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, ResponseError

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index.scripts import SCRIPTS
from kvferry.services.index.wire import Command, RedisWire, redacted

Address = tuple[str, int]
MIN_REFRESH_S = 0.2
PAUSE_S = 1.0


class ClusterWire:
    """`RedisWire.send` for a cluster, where a part may fail: an error stands in place of each reply it cost."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self.where = redacted(url)
        self._url = url
        self._timeout_s = timeout_s
        self._seed = RedisWire(url, timeout_s)
        self._wires: dict[Address, RedisWire] = {}
        self._ranges: list[tuple[int, int, Address]] = []  # first and last slot, their master
        self._slots: dict[str, int] = {}
        self._refreshing = asyncio.Lock()
        self._refreshed_at = float("-inf")
        self._why_no_map = ""
        self._background: asyncio.Task[None] | None = None
        self._asking: set[asyncio.Task[list[Any]]] = set()
        self._silent_until: dict[Address, float] = {}

    async def send(
        self, tags: Sequence[str], commands: Sequence[Command], patience_s: float | None = None
    ) -> list[Any]:
        """One command per tag, which names its slot. All in one round trip, two when slots have moved."""
        if not self._ranges:
            await self._refresh()
        replies = await self._send(tags, commands, patience_s)
        elsewhere = [i for i, reply in enumerate(replies) if isinstance(reply, AskError)]
        found = await asyncio.gather(*(self._ask_there(replies[i], commands[i]) for i in elsewhere))
        is_stale = any(isinstance(replies[i], MovedError) for i in elsewhere)
        for i, reply in zip(elsewhere, found, strict=True):
            replies[i] = reply
        down = [i for i, reply in enumerate(replies) if isinstance(reply, ClusterDownError)]
        if down:
            await self._refresh()
            again = await self._send([tags[i] for i in down], [commands[i] for i in down], patience_s)
            for i, reply in zip(down, again, strict=True):
                replies[i] = reply
        is_stale |= any(isinstance(reply, IndexUnavailable) for reply in replies)
        if is_stale and self._background is None:
            self._background = asyncio.create_task(self._refresh_later())  # nobody waits for it
        return replies

    async def _refresh_later(self) -> None:
        try:
            await self._refresh()
        finally:
            self._background = None

    async def _send(self, tags: Sequence[str], commands: Sequence[Command], patience_s: float | None) -> list[Any]:
        places: dict[Address | None, list[int]] = {}
        for i, tag in enumerate(tags):
            places.setdefault(self._master(tag), []).append(i)
        asking = {
            address: self._start(address, [commands[i] for i in numbers], patience_s)
            for address, numbers in places.items()
        }
        try:
            await asyncio.wait(asking.values(), timeout=patience_s)
        except asyncio.CancelledError:
            for task in asking.values():
                task.cancel()
            raise
        replies: list[Any] = [None] * len(commands)
        for address, numbers in places.items():
            task = asking[address]
            found = task.result() if task.done() or address is None else self._not_waited_for(address, len(numbers))
            for i, reply in zip(numbers, found, strict=True):
                replies[i] = reply
        return replies

    def _start(
        self, address: Address | None, commands: Sequence[Command], patience_s: float | None
    ) -> asyncio.Task[list[Any]]:
        is_left_alone = address is not None and patience_s is not None and self._is_silent(address)
        task = asyncio.create_task(self._ask(address, commands, is_left_alone))
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        return task

    async def _ask(self, address: Address | None, commands: Sequence[Command], is_left_alone: bool) -> list[Any]:
        try:
            if address is None:
                raise IndexUnavailable(f"Redis Cluster at {self.where}: no master for some slots")
            if is_left_alone:
                raise IndexUnavailable(f"Redis at {address[0]}:{address[1]} has been silent")
            found = await self._wire(address).send(commands)
        except IndexUnavailable as exc:
            return [exc] * len(commands)
        self._silent_until.pop(address, None)
        return list(found)

    def _is_silent(self, address: Address) -> bool:
        return time.monotonic() < self._silent_until.get(address, float("-inf"))

    def _not_waited_for(self, address: Address, count: int) -> list[Any]:
        """What was asked goes on until the answer or the timeout: a late one says that the master is there, and leaves
        an open connection behind."""
        self._silent_until[address] = time.monotonic() + PAUSE_S
        return [IndexUnavailable(f"Redis at {address[0]}:{address[1]} was not waited for")] * count

    async def _ask_there(self, error: AskError, command: Command) -> Any:
        """The reply of the node that the error names, or an error in its place. ASK (a MovedError is one, too): the
        slot is on its way to that node, which takes a command for it behind ASKING alone."""
        script = SCRIPTS.get(str(command[1])) if command[0] == "EVALSHA" else None
        before: list[Command] = [("SCRIPT", "LOAD", script.source)] if script else []
        if not isinstance(error, MovedError):
            before.append(("ASKING",))
        try:
            return (await self._wire(error.node_addr).send([*before, command]))[-1]
        except IndexUnavailable as exc:
            return exc

    def _master(self, tag: str) -> Address | None:
        if (slot := self._slots.get(tag)) is None:
            slot = self._slots[tag] = key_slot(tag.encode())
        return next((address for first, last, address in self._ranges if first <= slot <= last), None)

    def _wire(self, address: Address) -> RedisWire:
        if address not in self._wires:
            self._wires[address] = RedisWire(self._url, self._timeout_s, address)
        return self._wires[address]

    async def _refresh(self) -> None:
        """Asks the nodes one after the other for the map. Raises IndexUnavailable when there is none yet."""
        async with self._refreshing:
            if time.monotonic() - self._refreshed_at < MIN_REFRESH_S:
                return self._need_map()
            errors: list[object] = []
            talking = sorted(self._wires, key=self._silent_until.__contains__)
            for wire in (*(self._wires[address] for address in talking), self._seed):
                try:
                    (reply,) = await wire.send([("CLUSTER", "SLOTS")])
                except IndexUnavailable as exc:
                    errors.append(exc)
                    continue
                if isinstance(reply, ResponseError):
                    errors.append(reply)
                elif reply:
                    await self._take(reply, wire)
                    return
            self._refreshed_at, self._why_no_map = time.monotonic(), "; ".join(map(str, errors))
            self._need_map()

    def _need_map(self) -> None:
        if not self._ranges:
            raise IndexUnavailable(f"Redis Cluster at {self.where}: no map of slots: {self._why_no_map}")

    async def _take(self, reply: Sequence[Any], source: RedisWire) -> None:
        """An empty host is the one that was asked."""
        self._ranges = [
            (first, last, (master[0].decode() if master[0] else source.host, master[1]))
            for first, last, master, *_ in reply
        ]
        masters = {address for _, _, address in self._ranges}
        for address in self._wires.keys() - masters:
            self._silent_until.pop(address, None)
            await self._wires.pop(address).aclose()
        self._refreshed_at = time.monotonic()

    async def aclose(self) -> None:
        left = [*self._asking, *([self._background] if self._background else [])]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for wire in (self._seed, *self._wires.values()):
            await wire.aclose()
