"""A run as an HTTP response: JSON or server-sent events, for as long as the client is there.

The response begins with the run's first output, so that an error before it has a real status. An error after it is
an event in the stream. A client that leaves, or accepts nothing for too long, cancels the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.common.errors import Internal, KvferryError
from kvferry.services.gateway.choice import Piece
from kvferry.services.gateway.deadline import Deadline
from kvferry.services.gateway.errors import error_body, error_response, log
from kvferry.services.gateway.responses import DONE, Writer, error_event
from kvferry.services.gateway.run import Run

ABORT_EXTENSION = "kvferry.abort"
"""ASGI scope extension: its `abort` drops the connection without waiting for the client to accept what is left."""

WRITE_EXTENSION = "kvferry.write"
"""ASGI scope extension: its `write` takes more of a body that has begun past all middleware, which has no say in it any
more; False: not now, it must be sent."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Does `work` until done, or cancels it when the client leaves first; False then. The body must be read already."""
    main = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((main, watch), return_when=asyncio.FIRST_COMPLETED)
        finished = main.done()
        if finished:
            main.result()
        return finished
    finally:
        for task in (main, watch):
            task.cancel()
        await asyncio.gather(main, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _not_now(body: bytes) -> bool:
    return False


class RunResponse(Response):
    """Sends a run to the nodes and answers with what it produces."""

    def __init__(
        self,
        run: Run,
        writer: Writer,
        *,
        stream: bool,
        include_usage: bool,
        continuous_usage: bool,
        stall_timeout_s: float,
    ) -> None:
        super().__init__()
        self._run = run
        self._writer = writer
        self._stream = stream
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._stall_timeout_s = stall_timeout_s
        self._began = False
        self._stalled = False
        self._main: asyncio.Task[Any] | None = None
        self._write_now: Callable[[bytes], bool] = _not_now

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await while_connected(receive, self._answer(scope, receive, send)):
            self._run.metrics.aborted.inc()
        scope.setdefault("state", {})["ended"] = self._run.ended
        if self._stalled:
            self._run.metrics.stalled.inc()
            if (extension := scope.get("extensions", {}).get(ABORT_EXTENSION)) is not None:
                extension["abort"]()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers until the end, or until a write takes too long; cancellation means that the client left."""
        self._main = asyncio.current_task()
        self._stall = Deadline(self._give_up)
        if (extension := scope.get("extensions", {}).get(WRITE_EXTENSION)) is not None:
            self._write_now = extension["write"]
        try:
            await self._attempt(scope, receive, send)
        except asyncio.CancelledError:
            if not self._stalled:
                raise
        finally:
            self._stall.close()

    def _give_up(self) -> None:
        self._stalled = True
        if self._main is not None:
            self._main.cancel()

    async def _attempt(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Exactly one ending: the whole answer, an error status, or an error event."""
        try:
            async with self._run as run:
                await (self._send_events if self._stream else self._send_whole)(run, send)
        except KvferryError as exc:
            self._run.metrics.errors.labels(exc.code).inc()
            await self._send_error(exc, scope, receive, send)
        except Exception:
            log.exception("request %s failed in the gateway", self._run.job.request_id)
            bug = Internal("internal error: the gateway's log has the details")
            await self._send_error(bug, scope, receive, send)

    async def _send_error(self, error: KvferryError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._began:
            await self._write(send, error_event(error_body(error)) + DONE, more=False)
        else:
            await error_response(error)(scope, receive, send)

    async def _send_whole(self, run: Run, send: Send) -> None:
        gained: list[list[Piece]] = [[] for _ in range(run.job.num_choices)]
        while (pieces := await run.next()) is not None:
            for index, piece in pieces.items():
                gained[index].append(piece)
        body = self._writer.whole([Piece.join(parts) for parts in gained], run.usage)
        await self._begin(send, run, b"application/json", len(body))
        await self._write(send, body, more=False)

    async def _send_events(self, run: Run, send: Send) -> None:
        while (pieces := await run.next()) is not None:
            events = self._events(run, pieces)
            if not self._began:
                await self._begin(send, run, b"text/event-stream; charset=utf-8")
                events = self._writer.opening(run.job.num_choices) + events
            if events and not self._write_now(events):
                await self._write(send, events)
        last = self._writer.usage_event(run.usage) if self._include_usage else b""
        await self._write(send, last + DONE, more=False)

    def _events(self, run: Run, pieces: dict[int, Piece]) -> bytes:
        usage = run.usage if self._continuous_usage else None
        return b"".join([self._writer.event(index, piece, usage) for index, piece in pieces.items()])

    async def _begin(self, send: Send, run: Run, content_type: bytes, length: int | None = None) -> None:
        self._began = True
        headers = [(b"content-type", content_type), (b"x-kvferry-route", run.route.encode("latin-1", "replace"))]
        headers.append((b"cache-control", b"no-cache") if length is None else (b"content-length", b"%d" % length))
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Waits while the connection's buffer is full, at most `stall_timeout_s`."""
        self._stall.set(self._stall_timeout_s)
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self._stall.set(None)
