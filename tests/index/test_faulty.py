"""The index behind fail points."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.common.errors import IndexUnavailable
from kvferry.common.fail_points import FailPoints
from kvferry.services.index.base import Matches
from kvferry.services.index.faulty import with_faults
from kvferry.services.index.memory import MemoryIndex
from tests.gateway.test_alerts import DECODE


def test_without_fail_points_it_is_the_index_itself() -> None:
    index = MemoryIndex()
    assert with_faults(index, FailPoints("")) is index


def test_a_lost_lookup_looks_like_an_index_that_does_not_answer_and_the_next_one_arrives() -> None:
    async def run() -> None:
        index = with_faults(MemoryIndex(), FailPoints("index.lookup=drop@1"))
        with pytest.raises(IndexUnavailable, match="fail point"):
            await index.match([b"x"])
        assert await index.match([b"x"]) == Matches({}, {})
        assert (await index.nodes()).records == []

    asyncio.run(run())


def test_a_repeated_update_reaches_the_store_twice_and_changes_nothing() -> None:
    async def run() -> None:
        store = MemoryIndex()
        points = FailPoints("index.publish=duplicate:1")
        index = with_faults(store, points)
        assert await index.announce(DECODE, 60), "the second one knows it already: it must still be told to store"
        await index.store(DECODE.instance_id, [b"a", b"b"])
        await index.remove(DECODE.instance_id, [b"b"])
        await index.expect(DECODE.instance_id, [b"a", b"b", b"c"], 60)
        assert points.hits == {("index.publish", "duplicate"): 4}
        assert await store.match([b"a", b"b", b"c"]) == Matches({"i-d0": 1}, {"i-d0": 3})

    asyncio.run(run())


def test_a_corrupt_answer_claims_more_than_is_held() -> None:
    async def run() -> None:
        index = with_faults(MemoryIndex(), FailPoints("index.lookup=corrupt@1"))
        await index.announce(DECODE, 60)
        await index.store(DECODE.instance_id, [b"a"])
        assert (await index.match([b"a", b"b"])).held == {"i-d0": 2}
        assert (await index.match([b"a", b"b"])).held == {"i-d0": 1}

    asyncio.run(run())


@pytest.mark.parametrize("call", [("store", "i", [b"x"]), ("remove", "i", [b"x"]), ("expect", "i", [b"x"], 1.0)])
def test_a_lost_update_is_told_so_that_it_is_sent_again(call: tuple[Any, ...]) -> None:
    async def run() -> None:
        index = with_faults(MemoryIndex(), FailPoints("index.publish=drop:1"))
        with pytest.raises(IndexUnavailable):
            await getattr(index, call[0])(*call[1:])

    asyncio.run(run())
