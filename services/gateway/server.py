"""An ASGI app on a port: bind first, serve, drain on SIGTERM. Knows nothing of what the app does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvferry.common.errors import ConfigError
from kvferry.services.gateway.respond import ABORT_EXTENSION

log = logging.getLogger("kvferry.gateway")

LISTEN_BACKLOG = 2048
KEEP_ALIVE_S = 75  # for the next request, or the rest of a header
AFTER_DRAIN_S = 5.0  # for the last events to leave


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError naming the address when it cannot be had."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}", param="host") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as exc:
        listener.close()
        hint = ": is the port in use?" if port else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}{hint}", param="port") from exc
    listener.setblocking(False)
    return listener


class _Protocol(HttpToolsProtocol):
    """Drops connections that send no whole request, and lets the app drop one at once with all that is unsent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._expect_request()

    def _expect_request(self) -> None:
        """uvicorn waits for ever for the first request and for the rest of a header."""
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}


class Server(uvicorn.Server):
    """uvicorn with our own signals: it would end by raising SIGTERM once more, and exit non-zero."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def uvicorn_config(app: Any, drain_s: float) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(drain_s + AFTER_DRAIN_S),
        backlog=LISTEN_BACKLOG,
    )


async def serve(
    app: Any,
    listener: socket.socket,
    *,
    drain_s: float,
    on_ready: Callable[[], None],
    on_drain: Callable[[], None],
    on_grace_over: Callable[[], None],
) -> None:
    """Serves until SIGTERM or SIGINT. Then: `on_drain`, no new connections, `drain_s` for what runs, `on_grace_over`.

    A second signal ends the grace period at once.
    """
    server = Server(uvicorn_config(app, drain_s), on_ready)
    loop = asyncio.get_running_loop()
    grace: list[asyncio.TimerHandle] = []

    def stop() -> None:
        if not server.should_exit:
            log.info("draining: no new requests, up to %g s for those that run", drain_s)
            on_drain()
            grace.append(loop.call_later(drain_s, on_grace_over))
            server.should_exit = True
        else:
            on_grace_over()

    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, stop)
    try:
        await server.serve(sockets=[listener])
    finally:
        for timer in grace:
            timer.cancel()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(sig)
