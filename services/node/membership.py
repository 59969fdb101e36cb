"""A node's place in the index: announce, renew, publish which blocks it holds, leave.

The index may be away at any time. Then announcing goes on in the background, before the first time with growing
pauses; changes of block names wait (net, so at most one entry per name), and after an index that has lost something all
held names are published anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from kvferry.common.errors import IndexUnavailable
from kvferry.common.nodes import NodeRecord
from kvferry.services.engine.block_pool import NameChanges
from kvferry.services.index.base import PrefixIndex

log = logging.getLogger("kvferry.node")

PUBLISH_DELAY_S = 0.02
MAX_RETRY_S = 5.0


class Membership:
    def __init__(self, index: PrefixIndex, heartbeat_s: float, ttl_s: float) -> None:
        self.registered = asyncio.Event()
        self._index = index
        self._heartbeat_s = heartbeat_s
        self._ttl_s = ttl_s
        self._pending: dict[bytes, bool] = {}
        self._dirty = asyncio.Event()

    def publish(self, changes: NameChanges) -> None:
        """Queues name changes for the index. Later ones win."""
        for names, held in ((changes.stored, True), (changes.removed, False)):
            self._pending.update(dict.fromkeys(names, held))
        if self._pending:
            self._dirty.set()

    async def renew(self, record: Callable[[], NodeRecord], held_names: Callable[[], Iterable[bytes]]) -> None:
        """Announces the node until cancelled. Raises Unavailable when a newer instance has taken its place.

        Pauses grow only before the first time: a node that was known is missed from the moment the index is back.
        """
        retry_s = self._heartbeat_s
        while True:
            try:
                if await self._index.announce(record(), self._ttl_s):
                    self.publish(NameChanges(list(held_names()), []))
                retry_s = self._heartbeat_s
                self.registered.set()
            except IndexUnavailable as exc:
                log.warning("cannot register with the index, trying again in %.0f s: %s", retry_s, exc.message)
                if not self.registered.is_set():
                    retry_s = min(retry_s * 2, MAX_RETRY_S)
            await asyncio.sleep(retry_s)

    async def publish_forever(self, instance_id: str) -> None:
        """Sends queued name changes in batches until cancelled; a batch that fails is queued again."""
        while True:
            await self._dirty.wait()
            await self.registered.wait()
            await asyncio.sleep(PUBLISH_DELAY_S)
            self._dirty.clear()
            batch, self._pending = self._pending, {}
            if not await self._send(instance_id, batch):
                self._pending = batch | self._pending
                self._dirty.set()
                await asyncio.sleep(self._heartbeat_s)

    async def _send(self, instance_id: str, batch: dict[bytes, bool]) -> bool:
        """Where a part of the index is away, the rest still hears of both. False: not all is known to have arrived."""
        sent = 0
        with contextlib.suppress(IndexUnavailable):
            await self._index.remove(instance_id, [name for name, held in batch.items() if not held])
            sent += 1
        with contextlib.suppress(IndexUnavailable):
            await self._index.store(instance_id, [name for name, held in batch.items() if held])
            sent += 1
        return sent == 2

    async def leave(self, instance_id: str) -> None:
        """Withdraws the node, if the index answers, and closes the index."""
        try:
            await self._index.withdraw(instance_id)
        except IndexUnavailable as exc:
            log.warning("could not withdraw from the index, it will forget this node by itself: %s", exc.message)
        await self._index.aclose()
