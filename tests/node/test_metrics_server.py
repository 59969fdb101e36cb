from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter

from kvferry.common.errors import ConfigError
from kvferry.services.node.metrics_server import serve_metrics

OPEN_METRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def test_names_keep_their_colon_whatever_prometheus_would_like_best() -> None:
    registry = CollectorRegistry()
    Counter("kvferry:blocks", "moved", registry=registry).inc(3)
    port, close = serve_metrics(registry, "127.0.0.1", 0)
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": OPEN_METRICS})
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert "\nkvferry:blocks_total 3.0\n" in reply.read().decode()
    finally:
        close()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            serve_metrics(CollectorRegistry(), "127.0.0.1", port)
