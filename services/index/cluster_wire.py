"""A Redis Cluster: each command goes to the master of its slot, to all masters at once.

The map of slots is asked of any node that answers, again whenever a command went to the wrong node or a node failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ResponseError

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index.wire import Command, RedisWire, redacted

Address = tuple[str, int]
MIN_REFRESH_S = 0.2


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
        self._background: asyncio.Task[None] | None = None

    async def send(self, tags: Sequence[str], commands: Sequence[Command]) -> list[Any]:
        """One command per tag, which names its slot. All in one round trip, two when slots have moved."""
        if not self._ranges:
            await self._refresh()
        replies = await self._send(tags, commands)
        wrong = [i for i, reply in enumerate(replies) if isinstance(reply, AskError | ClusterDownError)]
        if wrong:
            await self._refresh()
            again = await self._send([tags[i] for i in wrong], [commands[i] for i in wrong])
            for i, reply in zip(wrong, again, strict=True):
                replies[i] = reply
        if any(isinstance(reply, IndexUnavailable) for reply in replies) and self._background is None:
            self._background = asyncio.create_task(self._refresh_later())  # nobody waits for it
        return replies

    async def _refresh_later(self) -> None:
        try:
            await self._refresh()
        finally:
            self._background = None

    async def _send(self, tags: Sequence[str], commands: Sequence[Command]) -> list[Any]:
        places: dict[Address | None, list[int]] = {}
        for i, tag in enumerate(tags):
            places.setdefault(self._master(tag), []).append(i)
        replies: list[Any] = [None] * len(commands)

        async def ask(address: Address | None, numbers: list[int]) -> None:
            try:
                if address is None:
                    raise IndexUnavailable(f"Redis Cluster at {self.where}: no master for some slots")
                found: Sequence[Any] = await self._wire(address).send([commands[i] for i in numbers])
            except IndexUnavailable as exc:
                found = [exc] * len(numbers)
            for i, reply in zip(numbers, found, strict=True):
                replies[i] = reply

        await asyncio.gather(*(ask(address, numbers) for address, numbers in places.items()))
        return replies

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
                return
            errors: list[object] = []
            for wire in (*self._wires.values(), self._seed):
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
            self._refreshed_at = time.monotonic()
            if not self._ranges:
                raise IndexUnavailable(f"Redis Cluster at {self.where}: no map of slots: {'; '.join(map(str, errors))}")

    async def _take(self, reply: Sequence[Any], source: RedisWire) -> None:
        """An empty host is the one that was asked."""
        self._ranges = [
            (first, last, (master[0].decode() if master[0] else source.host, master[1]))
            for first, last, master, *_ in reply
        ]
        masters = {address for _, _, address in self._ranges}
        for address in self._wires.keys() - masters:
            await self._wires.pop(address).aclose()
        self._refreshed_at = time.monotonic()

    async def aclose(self) -> None:
        if self._background:
            self._background.cancel()
            await asyncio.gather(self._background, return_exceptions=True)
        for wire in (self._seed, *self._wires.values()):
            await wire.aclose()
