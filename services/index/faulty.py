"""An index whose answers get lost or come late: see `common/fail_points.py`. Only made when fail points are on."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.common.errors import IndexUnavailable
from kvferry.common.fail_points import FailPoints
from kvferry.common.nodes import NodeRecord
from kvferry.services.index.base import Matches, PrefixIndex


def with_faults(index: PrefixIndex, fail_points: FailPoints) -> PrefixIndex:
    """The index itself while fail points are off."""
    return FaultyIndex(index, fail_points) if fail_points.are_on else index


class FaultyIndex:
    """A `PrefixIndex`. A dropped call does not reach the store, as if Redis had not answered."""

    def __init__(self, index: PrefixIndex, fail_points: FailPoints) -> None:
        self._index = index
        self._fail_points = fail_points

    async def announce(self, record: NodeRecord, ttl_s: float) -> bool:
        await self._pass("index.publish")
        return await self._index.announce(record, ttl_s)

    async def withdraw(self, instance_id: str) -> None:
        await self._index.withdraw(instance_id)

    async def nodes(self) -> list[NodeRecord]:
        await self._pass("index.lookup")
        return await self._index.nodes()

    async def store(self, instance_id: str, names: Sequence[bytes]) -> None:
        await self._pass("index.publish")
        await self._index.store(instance_id, names)

    async def remove(self, instance_id: str, names: Sequence[bytes]) -> None:
        await self._pass("index.publish")
        await self._index.remove(instance_id, names)

    async def expect(self, instance_id: str, names: Sequence[bytes], ttl_s: float) -> None:
        await self._pass("index.publish")
        await self._index.expect(instance_id, names, ttl_s)

    async def match(self, names: Sequence[bytes]) -> Matches:
        await self._pass("index.lookup")
        return await self._index.match(names)

    async def aclose(self) -> None:
        await self._index.aclose()

    async def _pass(self, point: str) -> None:
        if not await self._fail_points.copies(point):
            raise IndexUnavailable(f"fail point {point}")
