"""HTTP around the handlers: request ids, the access log, and bodies of bounded size."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.services.gateway.errors import QUIET_PATHS, BodyTooLarge, RequestTimeout

log = logging.getLogger("kvferry.access")


class RequestIds:
    """Middleware: every request has an id, the client's own (`x-request-id`) or a new one, and one log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        request_id = given if re.fullmatch(r"[!-~]{1,128}", given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        status, started = 0, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            took_s = time.monotonic() - started
            log.log(level, "%s %s %s %.3fs %s", scope["method"], scope["path"], status or "gone", took_s, request_id)


async def read_body(request: Request, limit_bytes: int, stall_timeout_s: float) -> bytes:
    """Raises BodyTooLarge as soon as that is known, and RequestTimeout when nothing comes for too long."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes, the limit is {limit_bytes}")
    chunks: list[bytes] = []
    num_bytes = 0
    stream = request.stream()
    while (chunk := await _next_chunk(stream, stall_timeout_s)) is not None:
        num_bytes += len(chunk)
        if num_bytes > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes, the limit")
        chunks.append(chunk)
    return b"".join(chunks)


async def _next_chunk(stream: AsyncIterator[bytes], timeout_s: float) -> bytes | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(stream, None)
    except TimeoutError as exc:
        raise RequestTimeout(f"nothing of the body came for {timeout_s:g} s") from exc
