"""An index whose answers get lost or come late: see `common/fail_points.py`. Only made when fail points are on."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.common.errors import IndexUnavailable
from kvferry.common.fail_points import Action, FailPoints, Fault, copies
from kvferry.common.nodes import NodeRecord
from kvferry.services.index.base import Matches, Nodes, PrefixIndex


def with_faults(index: PrefixIndex, fail_points: FailPoints) -> PrefixIndex:
    """The index itself while fail points are off."""
    return FaultyIndex(index, fail_points) if fail_points.are_on else index


class FaultyIndex:
    """A `PrefixIndex`. A dropped call does not reach the store, as if Redis had not answered. One that is repeated
    reaches it twice. A corrupt answer says of each node in it that it has all of the prompt."""

    def __init__(self, index: PrefixIndex, fail_points: FailPoints) -> None:
        self._index = index
        self._fail_points = fail_points

    async def announce(self, record: NodeRecord, ttl_s: float) -> bool:
        answers = [await self._index.announce(record, ttl_s) for _ in await self._passages("index.publish")]
        return any(answers)

    async def withdraw(self, instance_id: str) -> None:
        await self._index.withdraw(instance_id)

    async def nodes(self) -> Nodes:
        await self._passages("index.lookup")
        return await self._index.nodes()

    async def store(self, instance_id: str, names: Sequence[bytes]) -> None:
        for _ in await self._passages("index.publish"):
            await self._index.store(instance_id, names)

    async def remove(self, instance_id: str, names: Sequence[bytes]) -> None:
        for _ in await self._passages("index.publish"):
            await self._index.remove(instance_id, names)

    async def expect(self, instance_id: str, names: Sequence[bytes], ttl_s: float) -> None:
        for _ in await self._passages("index.publish"):
            await self._index.expect(instance_id, names, ttl_s)

    async def match(self, names: Sequence[bytes]) -> Matches:
        fault = self._fail_points.hit("index.lookup")
        await _passages(fault, "index.lookup")
        found = await self._index.match(names)
        if fault is not None and fault.action is Action.CORRUPT:
            return Matches(dict.fromkeys(found.held, len(names)), dict.fromkeys(found.coming, len(names)))
        return found

    async def aclose(self) -> None:
        await self._index.aclose()

    async def _passages(self, point: str) -> range:
        return await _passages(self._fail_points.hit(point), point)


async def _passages(fault: Fault | None, point: str) -> range:
    """As many as there are to be. Raises IndexUnavailable for none."""
    if not (count := await copies(fault)):
        raise IndexUnavailable(f"fail point {point}")
    return range(count)
