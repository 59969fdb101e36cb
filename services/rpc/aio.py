"""gRPC servers and channels with the options that every kvferry process uses."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvferry.common.errors import ConfigError
from kvferry.services.rpc.tls import Tls

Dial = Callable[[str], grpc.aio.Channel]
"""Opens a channel to `host:port`."""

LIVENESS = "liveness"
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    # Of pings that measure bandwidth: while one has no answer no keepalive is sent, and by default that is a minute.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.so_reuseport", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a restarted node is found again at once
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also what one attempt to connect may take
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def dialer(tls: Tls | None) -> Dial:
    """Opens channels that notice a dead peer within about 4 s while calls are open on them."""

    def open_channel(address: str) -> grpc.aio.Channel:
        if tls is None:
            return grpc.aio.insecure_channel(address, options=_OPTIONS)
        options = [*_OPTIONS, *tls.channel_options()]
        return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)

    return open_channel


open_channel = dialer(None)


class Server:
    """A gRPC server with the standard health service and reflection.

    `add` is called with the raw server to register servicers. The health of "" (take requests here) follows
    `set_serving`, that of "liveness" (this process is well) follows `set_alive` and holds from the start.
    """

    def __init__(
        self, add: Callable[[grpc.aio.Server], None], service_names: tuple[str, ...], tls: Tls | None = None
    ) -> None:
        self._tls = tls
        self.raw = grpc.aio.server(options=_OPTIONS)
        self.health = health.aio.HealthServicer()
        add(self.raw)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.raw)
        names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.raw)

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port. Raises ConfigError naming the address when it is taken."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if self._tls is None:
                bound = self.raw.add_insecure_port(address)
            else:
                bound = self.raw.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError as exc:
            raise ConfigError(f"cannot listen on {address}: is the port in use?") from exc
        if not bound:
            raise ConfigError(f"cannot listen on {address}: is the port in use?")
        await self.set_serving(False)
        await self.set_alive(True)
        await self.raw.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        await self._set_health("", serving)

    async def set_alive(self, alive: bool) -> None:
        await self._set_health(LIVENESS, alive)

    async def _set_health(self, service: str, well: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
        await self.health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        await self.health.enter_graceful_shutdown()
        await self.raw.stop(grace_s)
