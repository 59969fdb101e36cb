"""The document that describes the API is true: bodies made from it, and answers checked against it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from queue import Queue
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvferry.services.gateway.openapi import document, paths_of
from kvferry.services.gateway.routes import ADMIN_PATHS
from tests.gateway.fake_decode import FakeDecode
from tests.gateway.harness import Setup, gateway, run

DOCUMENT = document("1", asks_for_key=False)
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def served() -> Iterator[str]:
    """A gateway on a port, in front of a node that repeats the prompt."""
    addresses: Queue[Any] = Queue()

    async def serve() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        async with gateway(FakeDecode(), over_port=True) as setup:
            addresses.put((str(setup.client.base_url), lambda: loop.call_soon_threadsafe(stop.set)))
            await stop.wait()
            assert not setup.gateway.service.mailboxes

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    address, stop = addresses.get(timeout=30)
    yield address
    stop()
    thread.join(30)
    assert not thread.is_alive()


VALID = [(method, path, GenerationMode.POSITIVE) for method, path in sorted(paths_of(DOCUMENT))]
BROKEN = [("post", path, GenerationMode.NEGATIVE) for path in ("/v1/completions", "/v1/chat/completions")]


@pytest.mark.parametrize(("method", "path", "mode"), VALID + BROKEN)
def test_whatever_is_sent_the_answer_is_one_that_the_document_promises(
    served: str, method: str, path: str, mode: GenerationMode
) -> None:
    has_body = "requestBody" in DOCUMENT["paths"][path][method]
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][method.upper()]

    @settings(
        max_examples=10 if has_body else 1,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # else hardly any body gets past it
        response = case.call(base_url=served)
        case.validate_response(response, checks=CHECKS)

    check()
    assert httpx.get(f"{served}/ready").status_code == 200


def test_every_path_for_clients_is_described_and_no_other() -> None:
    async def scenario(setup: Setup) -> None:
        described = (await setup.client.get("/openapi.json")).json()
        assert described["paths"].keys() == DOCUMENT["paths"].keys()
        routes = [route for route in setup.gateway.app.routes if isinstance(route, APIRoute)]
        clients = {route.path for route in routes} - ADMIN_PATHS - {"/openapi.json", "/v1/models/{name:path}"}
        assert clients == described["paths"].keys()
        assert "security" not in described

    run(gateway(FakeDecode()), scenario)
    assert document("1", asks_for_key=True)["security"]
