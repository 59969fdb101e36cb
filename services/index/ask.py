"""One command to Redis at a time, for what gateways share beside the index."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ResponseError

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index.cluster_wire import ClusterWire
from kvferry.services.index.wire import Command, RedisWire


class Asker:
    """Belongs to one event loop. With connections of its own, which nothing else keeps busy."""

    def __init__(self, url: str, timeout_s: float, *, is_cluster: bool) -> None:
        self._wire = ClusterWire(url, timeout_s) if is_cluster else RedisWire(url, timeout_s)

    async def ask(self, tag: str, command: Command) -> Any:
        """The reply. `tag`: what the hash slot of the command's keys is made of. Raises IndexUnavailable, also where
        Redis says that it is wrong."""
        wire = self._wire
        (reply,) = await (wire.send([tag], [command]) if isinstance(wire, ClusterWire) else wire.send([command]))
        if isinstance(reply, ResponseError):
            raise IndexUnavailable(f"Redis: {reply}")
        if isinstance(reply, IndexUnavailable):
            raise reply
        return reply

    async def aclose(self) -> None:
        await self._wire.aclose()
