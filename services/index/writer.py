"""One instance's updates, each in its turn.

An update whose answer did not come may have been applied, may be applied later, or never. So it is sent again as it
was, before anything that follows; `scripts.py` applies each turn once. Where Redis is at another turn than it should be
it has lost something, and the instance has to begin anew.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index import runs
from kvferry.services.index.keys import Keys
from kvferry.services.index.scripts import REMOVE, STORE, Script
from kvferry.services.index.wire import Command

BLOCK_TTL_S = 3600
BATCH = 1024
"""Names per round trip: bounds how long one call holds Redis up (about 3 ms)."""


class Ask(Protocol):
    def __call__(self, *calls: tuple[str, Command]) -> Awaitable[list[Any]]: ...


@dataclass(frozen=True, slots=True)
class _Update:
    turn: int
    script: Script
    names: Sequence[bytes]


class Writer:
    """`lost`: what this instance holds must be told anew, under another number. It sends nothing more then."""

    def __init__(self, number: int, keys: Keys) -> None:
        self.number = number
        self.lost = False
        self._keys = keys
        self._packed = runs.packed(number)
        self._turns: dict[str, int] = {}  # by tag, the last one that Redis has acknowledged
        self._open: dict[str, _Update] = {}  # by tag, sent without an answer
        self._lock = asyncio.Lock()
        # `at` ends before the oldest blocks do, so every instance tells all it holds again in time, each at its own.
        self._life_ms = round(BLOCK_TTL_S * 1000 * random.uniform(0.6, 0.9))

    def acknowledged(self) -> dict[str, int]:
        """Tag -> turn that Redis must be at, or beyond."""
        return dict(self._turns)

    async def store(self, names: Sequence[bytes], ask: Ask) -> None:
        await self._update(STORE, names, ask)

    async def remove(self, names: Sequence[bytes], ask: Ask) -> None:
        await self._update(REMOVE, names, ask)

    async def _update(self, script: Script, names: Sequence[bytes], ask: Ask) -> None:
        """Raises IndexUnavailable when some of it is not known to be applied: all of it may be given again."""
        async with self._lock:
            failures = await self._send_open(ask)
            for start in range(0, len(names), BATCH):
                batch = names[start : start + BATCH]
                for tag, found in self._keys.by_tag(batch).items():
                    if tag not in self._open:
                        chosen = batch if len(found) == len(batch) else [batch[i] for i in found]
                        self._open[tag] = _Update(self._turns.get(tag, 0) + 1, script, chosen)
                failures += await self._send_open(ask)
            if failures and not self.lost:
                raise failures[0]

    async def _send_open(self, ask: Ask) -> list[IndexUnavailable]:
        if self.lost or not self._open:
            return []
        sent = list(self._open.items())
        replies = await ask(*((tag, self._command(tag, update)) for tag, update in sent))
        failures = []
        for (tag, update), reply in zip(sent, replies, strict=True):
            if isinstance(reply, IndexUnavailable):
                failures.append(reply)
                continue
            del self._open[tag]
            if reply == update.turn:
                self._turns[tag] = update.turn
            else:
                self.lost = True
        return failures

    def _command(self, tag: str, update: _Update) -> Command:
        keys: list[str | bytes] = [self._keys.at(tag, self.number), *self._keys.blocks(tag, update.names)]
        return update.script.call(keys, self._packed, update.turn, self._life_ms, BLOCK_TTL_S * 1000)
