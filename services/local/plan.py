"""What a local cluster consists of: programs, addresses, environments and priorities, made from the configuration."""

from __future__ import annotations

import random
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.common.config import Config, GatewayConfig
from kvferry.common.cores import NODE_ENVIRON, available_cores
from kvferry.common.errors import ConfigError, IndexUnavailable
from kvferry.common.nodes import Role
from kvferry.services.index.open import open_index
from kvferry.services.local.access import is_certificate_refusal
from kvferry.services.local.flags import config_environ
from kvferry.services.local.gpus import num_gpus, shared_out
from kvferry.services.local.redis_server import redis_command, redis_url
from kvferry.services.local.supervisor import Program
from kvferry.services.rpc.aio import Dial, dialer
from kvferry.services.rpc.tls import Tls

CLI = (sys.executable, "-P", "-m", "kvferry.services.local.cli")
PREFILL_NICENESS = 7
"""When a prefill and a decode node want the same core, decode goes first."""

READY_TIMEOUT_S = 1.0
GRACE_S = 5.0


def redis_program(binary: Path, folder: Path) -> Program:
    async def is_ready() -> bool:
        return await redis_problem(redis_url(folder), "kvferry", READY_TIMEOUT_S) is None

    return Program("redis", tuple(redis_command(binary, folder)), is_ready, grace_s=GRACE_S, quiet=True)


async def redis_problem(url: str, namespace: str, timeout_s: float) -> str | None:
    """What is wrong with the Redis at `url`; None: it answers."""
    index = open_index(url, namespace, timeout_s=timeout_s)
    try:
        await index.nodes()
    except IndexUnavailable as exc:
        return exc.message
    finally:
        await index.aclose()
    return None


def node_programs(config: Config, core_board: Path | None = None) -> list[Program]:
    """Decode nodes first. Names and ports are chosen here and stay over restarts.

    By way of the file `core_board` they lend each other idle cores, unless a number of threads was asked for.
    """
    if core_board is not None and config.engine.num_threads is None:
        engine = config.engine.model_copy(update={"core_board": str(core_board)})
        config = config.model_copy(update={"engine": engine})
    local = config.local
    roles = [Role.DECODE] * local.num_decode + [Role.BOTH] * local.num_both + [Role.PREFILL] * local.num_prefill
    host, first_port, metrics_port = config.node.node_host, config.node.node_port, config.node.metrics_port
    free = iter([] if first_port else free_ports(host, len(roles)))
    programs = []
    placed = shared_out(config.engine, len(roles), num_gpus())
    for i, (role, (engine, environ)) in enumerate(zip(roles, placed, strict=True)):
        update = {
            "node_id": f"{role}-{roles[:i].count(role)}",
            "node_port": first_port + i if first_port else next(free),
            "metrics_port": metrics_port + i if metrics_port else 0,
        }
        own = config.model_copy(update={"engine": engine, "node": config.node.model_copy(update=update)})
        programs.append(_node_program(own, role, environ))
    return programs


def _node_program(config: Config, role: Role, visible: dict[str, str]) -> Program:
    node, local = config.node, config.local
    # Two nodes with a thread for each core halve each other's speed and more; docs/benchmarks.md has the figures.
    share = max(1, available_cores() // (local.num_prefill + local.num_decode + local.num_both))
    threads = config.engine.num_threads or share
    engine = config.engine.model_copy(update={"num_threads": threads})
    config = config.model_copy(update={"engine": engine})
    environ = (
        NODE_ENVIRON
        | visible
        | config_environ(config)
        | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
        }
    )
    return Program(
        name=str(node.node_id),
        command=(*CLI, str(role)),
        is_ready=serving(join(node.node_host, node.node_port), dial(config)),
        environ=environ,
        niceness=PREFILL_NICENESS if role is Role.PREFILL else 0,
        grace_s=node.drain_s + GRACE_S,
    )


def gateway_program(config: Config) -> Program:
    url, tls = f"{gateway_url(config)}/ready", _own_tls(config.gateway)

    async def is_ready() -> bool:
        try:
            async with httpx.AsyncClient(timeout=READY_TIMEOUT_S, trust_env=False, verify=tls) as client:
                return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError as exc:
            # It serves others: our own certificate need not be one of those that its clients must show.
            return tls is not True and is_certificate_refusal(exc)

    environ = config_environ(config) | {"PYTHONUNBUFFERED": "1"}
    return Program("gateway", (*CLI, "gateway"), is_ready, environ, grace_s=config.node.drain_s + GRACE_S)


def _own_tls(config: GatewayConfig) -> ssl.SSLContext | bool:
    """To ask our own gateway on this machine, whatever name is in its certificate, which is also ours to show."""
    if config.ssl_certfile is None:
        return True
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as exc:
        raise ConfigError(f"HTTPS cannot use {config.ssl_certfile}: {exc}", param="ssl_certfile") from exc
    return context


def gateway_url(config: Config) -> str:
    """Where this machine reaches the gateway: an address to listen on is not always one to connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(config.gateway.host, config.gateway.host)
    scheme = "http" if config.gateway.ssl_certfile is None else "https"
    return f"{scheme}://{join(host, config.gateway.port)}"


def serving(address: str, dial: Dial) -> Callable[[], Awaitable[bool]]:
    async def is_ready() -> bool:
        # A new channel each time: an old one would wait longer and longer before it tries again.
        async with dial(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=READY_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    return is_ready


def dial(config: Config) -> Dial:
    return dialer(Tls.of(config.cluster))


def join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_NODE_PORTS = range(20000, 32000)


def free_ports(host: str, num: int) -> list[int]:
    """Ports that nobody listened on a moment ago, all different. Raises ConfigError when `host` is not ours.

    None of those that systems give to outgoing connections: one may be taken between this look and the listening.
    """
    _bind(host, 0, "--node-host").close()
    ports: list[int] = []
    for port in random.sample(_NODE_PORTS, len(_NODE_PORTS)):
        if len(ports) == num:
            break
        with suppress(ConfigError), _bind(host, port, "--node-host"):
            ports.append(port)
    return ports


def claim_gateway_port(config: Config) -> Config:
    """The configuration with a port that can be listened on now. Raises ConfigError when the one asked for is taken."""
    with _bind(config.gateway.host, config.gateway.port, "--port") as sock:
        port = int(sock.getsockname()[1])
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"port": port})})


def _bind(host: str, port: int, option: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else connections that just ended count as taken
    try:
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise ConfigError(
            f"cannot listen on {join(host, port)}: {exc.strerror} (choose another with {option})"
        ) from exc
    return sock
