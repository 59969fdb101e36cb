"""A node's `/metrics`, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from kvferry.common.errors import ConfigError


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """The port, and what closes it. Raises ConfigError that names an address which cannot be listened on.

    Always in Prometheus' text format: in OpenMetrics the client library writes `kvferry_x` for `kvferry:x`.
    """
    inner = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        environ.pop("HTTP_ACCEPT", None)
        page: Iterable[bytes] = inner(environ, start_response)
        return page

    try:
        server = make_server(host, port, app, ThreadingWSGIServer, _Quiet)
    except OSError as exc:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {exc.strerror}") from exc
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(5.0)

    return server.server_port, close
