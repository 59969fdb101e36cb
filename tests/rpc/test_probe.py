from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from kvferry.services.rpc import probe
from kvferry.services.rpc.aio import Server


async def ask(target: str) -> subprocess.CompletedProcess[str]:
    """As a container's health check does, in a process of its own."""

    command = (sys.executable, "-m", "kvferry.services.rpc.probe", target)
    return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=30)


def test_a_grpc_target_is_healthy_only_while_it_serves():
    async def scenario() -> None:
        server = Server(lambda raw: None, ())
        port = await server.start("127.0.0.1", 0)
        loading = await ask(f"grpc://127.0.0.1:{port}")
        assert (loading.returncode, loading.stderr.strip()) == (
            1,
            f"grpc://127.0.0.1:{port}: alive, and not serving (yet)",
        )
        await server.set_serving(True)
        assert (await ask(f"grpc://127.0.0.1:{port}")).returncode == 0
        assert (await ask(f"grpc://127.0.0.1:{port}/no-such-service")).returncode == 1
        await server.stop(0.0)
        assert (await ask(f"grpc://127.0.0.1:{port}")).returncode == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False), (302, False)])
def test_an_http_target_is_healthy_when_it_answers_200(status: int, is_healthy: bool):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        found = probe.problem(f"http://127.0.0.1:{server.server_port}/ready")
        server.shutdown()
        thread.join()
    assert (found is None) is is_healthy
    assert probe.problem(f"http://127.0.0.1:{server.server_port}/ready") is not None  # gone


@pytest.mark.parametrize("target", ["127.0.0.1:7000", "grpc://127.0.0.1", "ftp://host:1/"])
def test_a_target_of_neither_kind_is_refused_with_what_would_be_accepted(target: str, capsys: pytest.CaptureFixture):
    assert probe.main([target]) == 2
    assert "expected grpc://HOST:PORT[/SERVICE] or http://HOST:PORT/PATH" in capsys.readouterr().err


def test_a_probe_without_tls_imports_neither_torch_nor_pydantic():
    code = "import sys; from kvferry.services.rpc import probe; probe.problem('grpc://127.0.0.1:9')"
    code += "; print({'torch', 'pydantic', 'redis', 'fastapi'} & set(sys.modules))"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KVFERRY_")}
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=30, env=environ)
    assert done.stdout.strip() == "set()", done.stderr
