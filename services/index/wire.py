"""One Redis, many callers: pipelined round trips with a deadline over a small pool of connections.

Owned by us rather than left to redis-py's pool for one promise: a connection on which anything went wrong, a cancelled
caller included, is closed and never used again, so no reply can reach the wrong caller.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from kvferry.common.errors import ConfigError, IndexUnavailable

Command = tuple[str | bytes | int, ...]
MAX_CONNECTIONS = 16


class RedisWire:
    """`address`: host and port instead of the url's, as a cluster tells them."""

    def __init__(self, url: str, timeout_s: float, address: tuple[str, int] | None = None) -> None:
        try:
            # The pool is only the parser of the address and the maker of connections.
            self._factory = ConnectionPool.from_url(url, protocol=2, retry=Retry(NoBackoff(), 0))
        except ValueError as exc:
            raise ConfigError(f"Redis address {redacted(url)}: {exc}") from exc
        self.where = redacted(url)
        if address is not None:
            self._factory.connection_kwargs.update(host=address[0], port=address[1])
            self.where = f"{address[0]}:{address[1]}"
        self._timeout_s = timeout_s
        self._idle: deque[AbstractConnection] = deque()
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._closed = False

    async def send(self, commands: Sequence[Command]) -> list[Any]:
        """The replies, in order; a reply that is an error stands in its place as a ResponseError.

        All commands go out in one write. Raises IndexUnavailable when there is no whole answer within the timeout.
        """
        if self._closed:
            raise IndexUnavailable("the index is closed")
        try:
            async with asyncio.timeout(self._timeout_s), self._slots:
                while self._idle:
                    try:
                        return await self._exchange(self._idle.pop(), commands)
                    except (RedisError, OSError):
                        continue  # the server closed it while it was idle; every command may be repeated
                return await self._exchange(self._connection(), commands)
        except TimeoutError as exc:
            raise IndexUnavailable(f"Redis at {self.where} did not answer within {self._timeout_s:g} s") from exc
        except (RedisError, OSError) as exc:
            raise IndexUnavailable(f"Redis at {self.where}: {exc}") from exc

    def _connection(self) -> AbstractConnection:
        connection: AbstractConnection = self._factory.make_connection()  # type: ignore[no-untyped-call]
        # Our deadline is the only one: with one of its own, redis-py sends through `asyncio.wait_for`, which before
        # Python 3.12 can swallow a cancellation.
        connection.socket_timeout = connection.socket_connect_timeout = None
        return connection

    async def _exchange(self, connection: AbstractConnection, commands: Sequence[Command]) -> list[Any]:
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            await connection.send_packed_command(_pack(commands), check_health=False)
            replies = [await _read(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        if self._closed:
            await connection.disconnect(nowait=True)
        else:
            self._idle.append(connection)
        return replies

    @property
    def host(self) -> str:
        return str(self._factory.connection_kwargs.get("host", "localhost"))

    async def aclose(self) -> None:
        self._closed = True
        while self._idle:
            await self._idle.pop().disconnect()


def _pack(commands: Sequence[Command]) -> bytes:
    """In C: redis-py's own packing of 2,000 keys takes longer than all the rest of a lookup."""
    return b"".join(hiredis.pack_command(command) for command in commands)  # type: ignore[arg-type]


async def _read(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as exc:
        return exc


def redacted(url: str) -> str:
    """The address without its password, for messages."""
    scheme, sep, rest = url.partition("://")
    return f"{scheme}{sep}{rest.rpartition('@')[2]}"
