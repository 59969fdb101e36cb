"""Where the outputs for one HTTP request wait for the one who writes them to its client."""

from __future__ import annotations

import asyncio

from kvferry.common.errors import KvferryError
from kvferry.common.requests import RequestOutput


class Mailbox:
    """Outputs for one HTTP request, from all its submissions. One reader.

    Bounded by what was asked for: a node sends at most `max_tokens` tokens per choice. A reader that is slow finds
    several outputs at once and can make one event of them; it never holds up a session.
    """

    __slots__ = ("_error", "_outputs", "_waiter")

    def __init__(self) -> None:
        self._outputs: list[RequestOutput] = []
        self._error: KvferryError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        self._outputs.append(output)
        self._wake()

    def fail(self, error: KvferryError) -> None:
        """The next `take` raises this."""
        self._error = error
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """Everything that has come since the last call, at least one output. Cancelling it loses nothing."""
        while not self._outputs and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._error is not None:
            raise self._error
        outputs, self._outputs = self._outputs, []
        return outputs

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
