"""Who may come in: middleware that asks for an API key, and holds each key to its limits.

Open to everyone, because probes, Prometheus and a browser's address bar have no key and nothing secret is there:
`OPEN_PATHS`. A request is refused here before anything of its body is read.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.common.config import GatewayConfig
from kvferry.common.errors import KvferryError
from kvferry.services.gateway.api_keys import ApiKeys, InvalidApiKey, RateLimited, Tenant
from kvferry.services.gateway.errors import error_response
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.responses import Usage
from kvferry.services.gateway.shared_usage import SharedUsage

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/ping", "/metrics"})
EXPOSED_HEADERS = ("x-request-id", "x-kvferry-route", "retry-after")
COUNTED_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
"""Requests to these are what limits speak of."""


class Guard:
    """Puts the key's `tenant` into the scope's state. A handler puts the run there, whose tokens are counted."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, usage: SharedUsage, metrics: GatewayMetrics) -> None:
        self._app = app
        self._keys = keys
        self._usage = usage
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            tenant = self._keys.tenant(_key_of(scope))
        except InvalidApiKey as exc:
            await _refuse(exc, {"www-authenticate": "Bearer"}, scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        if scope["path"] in COUNTED_PATHS and scope["method"] == "POST":
            await self._counted(tenant, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _counted(self, tenant: Tenant, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._usage.admit(tenant)
        except RateLimited as exc:
            self._metrics.key_refused(tenant.record.name)
            await _refuse(exc, tenant.headers(), scope, receive, send)
            return

        is_answer = is_released = False

        async def release() -> None:
            nonlocal is_released
            if is_released:
                return
            is_released = True
            run = scope["state"].get("run")
            used = run.usage if run is not None and is_answer else Usage(0, 0, 0)
            self._metrics.key_used(tenant.record.name, used.prompt_tokens, used.completion_tokens)
            await self._usage.release(tenant, used.prompt_tokens + used.completion_tokens)

        async def send_with_limits(message: Message) -> None:
            nonlocal is_answer
            if message["type"] == "http.response.start":
                is_answer = message["status"] < HTTPStatus.BAD_REQUEST  # a refusal costs its key no tokens
                limits = [(name.encode(), value.encode()) for name, value in tenant.headers().items()]
                message["headers"] = [*message["headers"], *limits]
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                await release()  # who has the end of the answer may ask again at once, anywhere
            await send(message)

        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            await release()


def guard(app: FastAPI, config: GatewayConfig, usage: SharedUsage, metrics: GatewayMetrics) -> None:
    """What of it is configured: keys, and browsers' questions about other sites before them, which carry none."""
    if (keys := ApiKeys.of(config.api_keys, config.api_keys_file)) is not None:
        for name in keys.names:  # counts that begin at 0 lose nothing of their first increase
            metrics.key_known(name)
        app.add_middleware(Guard, keys=keys, usage=usage, metrics=metrics)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )


def _key_of(scope: Scope) -> str:
    """Raises InvalidApiKey where there is none."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"").decode("latin-1")
    scheme, _, key = given.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise InvalidApiKey("this server asks for an API key, as the header `Authorization: Bearer KEY`")
    return key.strip()


async def _refuse(error: KvferryError, headers: dict[str, str], scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(error)
    response.headers.update(headers)
    await response(scope, receive, send)
