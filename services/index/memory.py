"""The prefix index in this process's memory: for tests, and the plain statement of what an index does."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.common.errors import IndexUnavailable, Unavailable
from kvferry.common.nodes import NodeRecord
from kvferry.services.index.base import MAX_EXPECTED, Matches, Nodes


@dataclass(slots=True)
class _Entry:
    record: NodeRecord
    deadline_s: float
    blocks: set[bytes] = field(default_factory=set)


class MemoryIndex:
    """A `PrefixIndex`. Instances share nothing: pass the same object to everyone who should see the same nodes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._closed = False
        self.flush()

    def flush(self) -> None:
        """Forgets everything, as a Redis does that was emptied."""
        self._entries: dict[str, _Entry] = {}  # by node id
        self._latest: dict[str, str] = {}  # node id -> its newest instance, dead or alive
        self._replaced: set[str] = set()  # instances that a newer one has taken over from
        self._expected: dict[bytes, dict[tuple[str, tuple[bytes, ...]], float]] = {}  # by first name; until when
        self._memory = secrets.token_bytes(8)

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

    async def nodes(self) -> Nodes:
        self._sweep()
        records = (entry.record for entry in self._entries.values())
        return Nodes(sorted(records, key=lambda record: record.node_id), self._memory)

    async def store(self, instance_id: str, names: Sequence[bytes]) -> None:
        if entry := self._find(instance_id):
            entry.blocks.update(names)

    async def remove(self, instance_id: str, names: Sequence[bytes]) -> None:
        if entry := self._find(instance_id):
            entry.blocks.difference_update(names)

    async def expect(self, instance_id: str, names: Sequence[bytes], ttl_s: float) -> None:
        self._sweep()
        if names:
            found, prompt = self._expected.setdefault(names[0], {}), (instance_id, tuple(names))
            found[prompt] = max(self._clock() + ttl_s, found.get(prompt, 0.0))
            if len(found) > MAX_EXPECTED:
                del found[min(found, key=found.__getitem__)]

    async def match(self, names: Sequence[bytes]) -> Matches:
        self._sweep()
        held, coming = dict[str, int](), dict[str, int]()
        for entry in self._entries.values():
            if run := _num_leading(name in entry.blocks for name in names):
                held[entry.record.instance_id] = run
        for instance_id, expected in self._expected.get(names[0], ()) if names else ():
            if self._find(instance_id):
                run = _num_leading(a == b for a, b in zip(names, expected, strict=False))
                coming[instance_id] = max(run, coming.get(instance_id, 0))
        return Matches(held, coming)

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
        for first, found in list(self._expected.items()):
            self._expected[first] = {prompt: until for prompt, until in found.items() if until > now}
            if not self._expected[first]:
                del self._expected[first]


def _num_leading(hits: Iterable[bool]) -> int:
    return sum(itertools.takewhile(bool, hits))
