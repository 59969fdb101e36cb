"""An ASGI app on a port: bind first, serve, drain on SIGTERM. Knows nothing of what the app does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvferry.common.config import GatewayConfig
from kvferry.common.errors import ConfigError
from kvferry.common.stop_signals import stop_signals
from kvferry.services.gateway.http_tls import HttpTls
from kvferry.services.gateway.respond import ABORT_EXTENSION, WRITE_EXTENSION

log = logging.getLogger("kvferry.gateway")

LISTEN_BACKLOG = 2048
KEEP_ALIVE_S = 75  # for the next request, or the rest of a header
MAX_HEADER_BYTES = 64 * 2**10
AFTER_DRAIN_S = 5.0  # for the last events to leave


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; `shared`: one that others may be bound beside, and that does not listen yet.

    Raises ConfigError naming the address when it cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}", param="host") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if not shared:
            listener.listen(LISTEN_BACKLOG)
    except OSError as exc:
        listener.close()
        hint = ": is the port in use?" if port else ""
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror}{hint}", param="port") from exc
    listener.setblocking(False)
    return listener


def addresses(config: GatewayConfig) -> list[tuple[str, int]]:
    """Where the API is served, and then admin-port's address, if there is one."""
    api = (config.host, config.port)
    return [api] if config.admin_port is None else [api, (config.admin_host, config.admin_port)]


def open_listeners(config: GatewayConfig) -> list[socket.socket]:
    """The API's socket, then admin-port's if there is one; inherited, or bound. Raises ConfigError."""
    wanted = addresses(config)
    if not config.listen_fds:
        return [bind(host, port) for host, port in wanted]
    if len(config.listen_fds) != len(wanted):
        raise ConfigError(f"listen_fds {config.listen_fds}: expected {len(wanted)} sockets", param="listen_fds")
    try:
        listeners = [socket.socket(fileno=fd) for fd in config.listen_fds]
    except OSError as exc:
        raise ConfigError(f"listen_fds {config.listen_fds}: {exc.strerror}", param="listen_fds") from exc
    for listener in listeners:
        listener.setblocking(False)
    return listeners


class _Protocol(HttpToolsProtocol):
    """Drops connections that send no whole header in time, and refuses endless ones; uvicorn waits for both for ever.

    Lets the app drop a connection at once with all that is unsent, and write to one that has room.
    """

    _in_header = False
    _header_bytes = 0  # of the header that comes in: parsed, or arrived behind its first piece
    _due_s: float | None = None  # when that header must be whole

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        was_in_header, before = self._in_header, self._header_bytes
        super().data_received(data)
        if was_in_header and self._in_header:
            self._header_bytes = before + len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self.send_400_response("")
        if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self._expect_header()

    def _expect_header(self) -> None:
        """However it trickles in: the time begins with its first byte, or with the connection."""
        self._unset_keepalive_if_required()
        if self._due_s is None:
            self._due_s = self.loop.time() + self.timeout_keep_alive
        self.timeout_keep_alive_task = self.loop.call_at(self._due_s, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_header, self._header_bytes = True, 0
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the header is too large")  # which ends the parsing

    def on_headers_complete(self) -> None:
        self._in_header, self._due_s = False, None
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope["extensions"][WRITE_EXTENSION] = {"write": partial(_write, self.cycle)}

    def send_400_response(self, msg: str) -> None:
        if not (self._in_header and self._header_bytes > MAX_HEADER_BYTES):
            super().send_400_response(msg)
            return
        line, text = b"431 Request Header Fields Too Large", b"the header has more than %d bytes" % MAX_HEADER_BYTES
        head = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close" % len(text)
        self.transport.write(b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (line, head, text))
        self.transport.close()


def _write(cycle: RequestResponseCycle, body: bytes) -> bool:
    """What `cycle.send` does with more of a chunked body while nothing is in its way; else False."""
    if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
    return True


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


def uvicorn_config(app: Any, drain_s: float, tls: HttpTls | None = None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        ssl_context_factory=None if tls is None else lambda config, default: tls.context,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=round(drain_s + AFTER_DRAIN_S),
        backlog=LISTEN_BACKLOG,
    )


async def serve(
    app: Any,
    listener: socket.socket,
    *,
    drain_s: float,
    tls: HttpTls | None = None,
    on_ready: Callable[[], None],
    on_drain: Callable[[], None],
    on_grace_over: Callable[[], None],
    admin: tuple[Any, socket.socket] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. Then: `on_drain`, no new connections, `drain_s` for what runs, `on_grace_over`.

    A second signal ends the grace period at once. `admin`: an app that is served on its own port beside it, a drain
    included.
    """
    server = Server(uvicorn_config(app, drain_s, tls), on_ready)
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

    with stop_signals(stop, signal.SIGTERM, signal.SIGINT):
        try:
            async with _beside(admin):
                await server.serve(sockets=[listener])
        finally:
            for timer in grace:
                timer.cancel()


@contextlib.asynccontextmanager
async def _beside(admin: tuple[Any, socket.socket] | None) -> AsyncIterator[None]:
    if admin is None:
        yield
        return
    app, listener = admin
    config = uvicorn_config(app, 0.0)
    config.lifespan = "off"
    server = Server(config, lambda: None)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
