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

from kvferry.common.log import log_fields
from kvferry.services.gateway.api_keys import Tenant
from kvferry.services.gateway.errors import QUIET_PATHS, BodyTooLarge, RequestTimeout
from kvferry.services.gateway.recent import RecentRequest

log = logging.getLogger("kvferry.access")

MIN_BODY_BYTES_PER_S = 1024


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
                message["headers"] = [*message["headers"], (b"x-request-id", scope["state"]["request_id"].encode())]
            await send(message)

        with log_fields(request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            finally:
                _log_access(scope, status, time.monotonic() - started, scope["state"]["request_id"])


def _log_access(scope: Scope, status: int, took_s: float, request_id: str) -> None:
    """One line. The scope's state says whose API key it came with (`tenant`) and what the nodes did for it (`ended`).

    Never the key, the query, a header or a body.
    """
    method, path = scope["method"], _printable(scope["path"])
    facts: dict[str, object] = {"method": method, "path": path, "status": status, "duration_s": round(took_s, 6)}
    tenant, ended = scope["state"].get("tenant"), scope["state"].get("ended")
    whose = ""
    if isinstance(tenant, Tenant):
        facts["api_key_name"] = tenant.record.name
        whose = f" of {tenant.record.name}"
    if isinstance(ended, RecentRequest):
        facts |= {
            "prompt_tokens": ended.prompt_tokens,
            "cached_tokens": ended.cached_tokens,
            "generation_tokens": ended.output_tokens,
            "decode_node": ended.decode,
            "prefill_node": ended.prefill,
            "ended": ended.ended,
        }
    level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
    log.log(level, "%s %s %s %.3fs %s%s", method, path, status or "gone", took_s, request_id, whose, extra=facts)


def _printable(path: str) -> str:
    """Who chooses the path must not write lines of our log, or to the terminal that shows it."""
    return path if path.isprintable() else path.encode("unicode_escape").decode()


async def read_body(request: Request, limit_bytes: int, stall_timeout_s: float) -> bytes:
    """Raises BodyTooLarge as soon as that is known, and RequestTimeout when nothing comes for too long, or too little.

    Too little: less than `MIN_BODY_BYTES_PER_S`, but for the first `stall_timeout_s`.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLarge(f"the body has {declared} bytes, the limit is {limit_bytes}")
    chunks: list[bytes] = []
    num_bytes = 0
    stream, begun_s = request.stream(), time.monotonic()
    while (chunk := await _next_chunk(stream, stall_timeout_s)) is not None:
        if (took_s := time.monotonic() - begun_s) > stall_timeout_s + num_bytes / MIN_BODY_BYTES_PER_S:
            raise RequestTimeout(f"only {num_bytes} bytes of the body came in {took_s:.0f} s")
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
