"""What an instance tells several shards of a cluster, of which one does not answer for a while."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index.keys import Keys
from kvferry.services.index.wire import Command
from kvferry.services.index.writer import Writer
from tests.index.conformance import chain


@pytest.mark.parametrize("num_silences", [0, 1, 2, 3, 4])
def test_what_a_silent_shard_was_not_told_is_not_taken_for_told(num_silences: int) -> None:
    keys, names = Keys("test", is_cluster=True), chain(200)
    silent = next(iter(keys.by_tag(names)))
    writer, silences = Writer(7, keys), num_silences
    turns: dict[str, int] = {}
    told: set[bytes] = set()

    async def ask(*calls: tuple[str, Command]) -> list[Any]:
        nonlocal silences
        replies: list[Any] = []
        for tag, command in calls:
            if tag == silent and silences:
                silences -= 1
                replies.append(IndexUnavailable("no answer"))
                continue
            turns[tag] = turns.get(tag, 0) + 1
            told.update(key for key in command if isinstance(key, bytes))
            replies.append(turns[tag])
        return replies

    async def run() -> None:
        pending = names[:100]
        rest = [names[100:150], names[150:]]
        while pending:  # as the node does: what failed is given again, with what has come since
            try:
                await writer.store(pending, ask)
                pending = []
            except IndexUnavailable:
                pass
            pending = pending + (rest.pop(0) if rest else [])

    asyncio.run(run())
    assert not writer.lost
    wanted = {key for tag, found in keys.by_tag(names).items() for key in keys.blocks(tag, [names[i] for i in found])}
    assert told >= wanted
