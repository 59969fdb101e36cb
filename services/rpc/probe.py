"""`python -m kvferry.services.rpc.probe TARGET`: exits 0 when the target serves. The health check of containers.

`grpc://HOST:PORT[/SERVICE]` asks the standard gRPC health service, `http://HOST:PORT/PATH` wants status 200. It starts
every few seconds beside the process that it asks, so it imports only what one question needs.
"""

from __future__ import annotations

import os
import sys
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

if TYPE_CHECKING:
    import grpc

TIMEOUT_S = 3.0


def problem(target: str) -> str | None:
    """Why `target` does not serve now; None: it does. Raises ValueError for an address of neither kind."""
    url = urlsplit(target)
    if url.scheme not in ("grpc", "http") or not url.hostname or not url.port:
        raise ValueError(f"target {target!r}: expected grpc://HOST:PORT[/SERVICE] or http://HOST:PORT/PATH")
    return _grpc_problem(url) if url.scheme == "grpc" else _http_problem(url)


def _http_problem(url: SplitResult) -> str | None:
    connection = HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", url.path or "/")
        reply = connection.getresponse()
        return None if reply.status == 200 else f"{reply.status} {reply.read(1000).decode(errors='replace')}"
    except (OSError, HTTPException) as exc:
        return str(exc) or type(exc).__name__
    finally:
        connection.close()


def _grpc_problem(url: SplitResult) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with _channel(url.netloc) as channel:
        try:
            question = health_pb2.HealthCheckRequest(service=url.path.removeprefix("/"))
            reply = health_pb2_grpc.HealthStub(channel).Check(question, timeout=TIMEOUT_S)
        except grpc.RpcError as exc:
            return str(exc.details() if isinstance(exc, grpc.Call) else exc)
    status: int = reply.status
    return None if status == health_pb2.HealthCheckResponse.SERVING else "alive, and not serving (yet)"


def _channel(address: str) -> grpc.Channel:
    import grpc

    if not any(name in os.environ for name in ("KVFERRY_CLUSTER__RPC_TLS_CERT", "KVFERRY_CONFIG")):
        return grpc.insecure_channel(address)
    from kvferry.common.config import load_config  # takes as long to import as all the rest
    from kvferry.services.rpc.tls import Tls

    tls = Tls.of(load_config().cluster)
    if tls is None:
        return grpc.insecure_channel(address)
    return grpc.secure_channel(address, tls.channel_credentials(), options=tls.channel_options())


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: probe grpc://HOST:PORT[/SERVICE] | http://HOST:PORT/PATH", file=sys.stderr)
        return 2
    try:
        found = problem(arguments[0])
    except ValueError as exc:
        print(f"probe: {exc}", file=sys.stderr)
        return 2
    if found is not None:
        print(f"{arguments[0]}: {found}", file=sys.stderr)
    return int(found is not None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
