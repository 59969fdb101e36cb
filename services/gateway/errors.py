"""Our errors as OpenAI-shaped HTTP answers. The one table for this direction.

Every answer that is not a success goes through here, also those that Starlette and pydantic raise, so that a client
never sees FastAPI's `detail`, and `param` names the field at fault.
"""

from __future__ import annotations

import http
import logging
import reprlib
from collections.abc import Mapping, Sequence

import orjson
from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from kvferry.common.errors import BadRequest, Cancelled, Internal, KvferryError, Overloaded, Unavailable

log = logging.getLogger("kvferry.gateway")

RETRY_AFTER_S = 1
QUIET_PATHS = frozenset({"/", "/cluster/live", "/health", "/ready", "/metrics"})
"""Polled by others all day: not logged, whatever the answer."""


class BodyTooLarge(KvferryError):
    code = "body_too_large"
    http_status = 413
    type = "invalid_request_error"


class RequestTimeout(KvferryError):
    code = "request_timeout"
    http_status = 408
    type = "invalid_request_error"


def error_body(error: KvferryError) -> bytes:
    return orjson.dumps(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def error_response(error: KvferryError) -> Response:
    headers = {}
    if isinstance(error, Overloaded | Unavailable):
        seconds = error.retry_after_s if isinstance(error, Overloaded) else RETRY_AFTER_S
        headers = {"retry-after": str(seconds)}
    if isinstance(error, RequestTimeout):
        headers = {"connection": "close"}  # the rest of the body may never come
    return _json(error.http_status, error_body(error), headers)


def param_of(location: Sequence[int | str]) -> str:
    """`('messages', 2, 'role')` -> `messages[2].role`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def from_validation(exc: ValidationError) -> BadRequest:
    """The first thing that pydantic found, as one sentence that names the field and the value."""
    first = exc.errors(include_url=False)[0]
    param = param_of([part for part in first["loc"] if isinstance(part, int) or part.isidentifier()])
    if first["type"] == "missing":
        return BadRequest(f"{param} is required", param=param)
    shown = reprlib.repr(first["input"])
    return BadRequest(f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {shown}", param=param)


def install(app: FastAPI) -> None:
    """Makes every failure of `app` answer in OpenAI's shape."""
    app.add_exception_handler(KvferryError, _on_kvferry_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


async def _on_kvferry_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, KvferryError)
    if exc.http_status >= 500:
        level = logging.DEBUG if request.url.path in QUIET_PATHS else logging.WARNING
        log.log(level, "%s %s: %s", request.method, request.url.path, exc.message)
    return error_response(exc)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    if exc.status_code == 404:
        message, code = f"no such path: {request.method} {request.url.path}", "path_not_found"
    elif exc.status_code == 405:
        message, code = f"method {request.method} is not allowed for {request.url.path}", "method_not_allowed"
    else:
        message, code = str(exc.detail), http.HTTPStatus(exc.status_code).name.lower()
    kind = "invalid_request_error" if exc.status_code < 500 else "server_error"
    body = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return _json(exc.status_code, orjson.dumps(body), exc.headers or {})


async def _on_disconnect(request: Request, exc: Exception) -> Response:
    return error_response(Cancelled("the client left while sending the request"))


async def _on_bug(request: Request, exc: Exception) -> Response:
    """The server logs the traceback; the client is told nothing that is ours alone."""
    return error_response(Internal("internal error: the gateway's log has the details"))


def _json(status: int, body: bytes, headers: Mapping[str, str]) -> Response:
    return Response(body, status, headers=dict(headers), media_type="application/json")
