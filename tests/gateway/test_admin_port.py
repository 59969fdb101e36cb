"""With an admin port, what is for operators is there and nowhere else."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest

from kvferry.services.gateway import server
from kvferry.services.gateway.app import Gateway
from kvferry.services.gateway.routes import ADMIN_PATHS
from kvferry.services.index.memory import MemoryIndex
from tests.gateway.fake_decode import FakeDecode
from tests.gateway.harness import Setup, config, gateway, run
from tests.gateway.tiny_tokenizer import tiny_tokenizer

PATHS = sorted(path.replace("{request_id}", "some") for path in ADMIN_PATHS)


def test_clients_find_nothing_for_operators_and_operators_no_api() -> None:
    async def scenario(setup: Setup) -> None:
        admin_app = setup.gateway.admin_app
        assert admin_app is not None
        async with httpx.AsyncClient(transport=httpx.ASGITransport(admin_app), base_url="http://admin") as admin:
            reply = await setup.complete()
            route = f"/debug/route/{reply.json()['id']}"
            for path in (*PATHS, route):
                refused = await setup.client.get(path)
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "path_not_found"), path
            for path in ("/", "/cluster", "/cluster/live", "/metrics", route):
                assert (await admin.get(path)).status_code == 200, path
            assert "kvferry:num_requests_running 0.0" in (await admin.get("/metrics")).text
            for path in ("/health", "/ready", "/version"):
                for client in (admin, setup.client):
                    assert (await client.get(path)).status_code == 200, path
            assert (await admin.post("/v1/completions", json={"prompt": "x"})).status_code == 404

    run(gateway(FakeDecode(), admin_port=0), scenario)


def test_without_one_all_of_it_is_on_the_api_port() -> None:
    async def scenario(setup: Setup) -> None:
        assert setup.gateway.admin_app is None
        for path in ("/", "/cluster", "/cluster/live", "/metrics", "/health", "/v1/models"):
            assert (await setup.client.get(path)).status_code == 200, path

    run(gateway(FakeDecode()), scenario)


def test_both_ports_are_served_and_the_admin_port_outlives_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        options = config(port=0, admin_port=0)
        app = Gateway(options, MemoryIndex(), tiny_tokenizer())
        listeners = server.open_listeners(options.gateway)
        urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        ready, seen = asyncio.Event(), list[int]()
        stop = asyncio.Event()

        class Ours(server.Server):
            """Asks the admin port while the API's is being shut down."""

            async def shutdown(self, sockets: object = None) -> None:
                if self.config.lifespan == "on":
                    async with httpx.AsyncClient() as client:
                        seen.append((await client.get(f"{urls[1]}/health")).status_code)
                await super().shutdown(sockets)  # type: ignore[arg-type]

        monkeypatch.setattr(server, "Server", Ours)
        serving = asyncio.create_task(
            server.serve(
                app.app,
                listeners[0],
                drain_s=0.0,
                on_ready=ready.set,
                on_drain=stop.set,
                on_grace_over=app.end_grace,
                admin=(app.admin_app, listeners[1]),
            )
        )
        await ready.wait()
        async with httpx.AsyncClient() as client:
            statuses = [(await client.get(url + path)).status_code for url in urls for path in ("/health", "/metrics")]
        assert statuses == [200, 404, 200, 200]
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        assert stop.is_set()
        assert seen == [200]

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        asyncio.run(scenario())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
