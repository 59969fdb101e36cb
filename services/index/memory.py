"""The prefix index in this process's memory: for tests, and the plain statement of what an index does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.common.errors import IndexUnavailable, Unavailable
from kvferry.common.nodes import NodeRecord


@dataclass(slots=True)
class _Entry:
    record: NodeRecord
    deadline_s: float
    blocks: set[bytes] = field(default_factory=set)


class MemoryIndex:
    """A `PrefixIndex`. Instances share nothing: pass the same object to everyone who should see the same nodes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[str, _Entry] = {}  # by node id
        self._latest: dict[str, str] = {}  # node id -> its newest instance, dead or alive
        self._replaced: set[str] = set()  # instances that a newer one has taken over from
        self._closed = False

    async def announce(self, record: NodeRecord, ttl_s: float) -> bool:
        self._sweep()
        if record.instance_id in self._replaced:
            raise Unavailable(f"node {record.node_id}: a newer instance has taken over from {record.instance_id}")
        if (newest := self._latest.get(record.node_id)) not in (None, record.instance_id):
            self._replaced.add(str(newest))
        self._latest[record.node_id] = record.instance_id
        deadline_s = self._clock() + ttl_s
        entry = self._entries.get(record.node_id)
        if entry is not None and entry.record.instance_id == record.instance_id:
            entry.record, entry.deadline_s = record, deadline_s
            return False
        self._entries[record.node_id] = _Entry(record, deadline_s)
        return True

    async def withdraw(self, instance_id: str) -> None:
        if entry := self._find(instance_id):
            del self._entries[entry.record.node_id]

    async def nodes(self) -> list[NodeRecord]:
        self._sweep()
        return sorted((entry.record for entry in self._entries.values()), key=lambda record: record.node_id)

    async def store(self, instance_id: str, names: Sequence[bytes]) -> None:
        if entry := self._find(instance_id):
            entry.blocks.update(names)

    async def remove(self, instance_id: str, names: Sequence[bytes]) -> None:
        if entry := self._find(instance_id):
            entry.blocks.difference_update(names)

    async def match(self, names: Sequence[bytes]) -> dict[str, int]:
        self._sweep()
        runs = {}
        for entry in self._entries.values():
            run = next((i for i, name in enumerate(names) if name not in entry.blocks), len(names))
            if run:
                runs[entry.record.instance_id] = run
        return runs

    async def aclose(self) -> None:
        self._closed = True

    def _find(self, instance_id: str) -> _Entry | None:
        self._sweep()
        return next((e for e in self._entries.values() if e.record.instance_id == instance_id), None)

    def _sweep(self) -> None:
        if self._closed:
            raise IndexUnavailable("the index is closed")
        now = self._clock()
        for node_id in [node_id for node_id, entry in self._entries.items() if entry.deadline_s <= now]:
            del self._entries[node_id]
