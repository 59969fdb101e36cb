"""HTTPS on a real port: who gets in, and certificates that change under a running gateway."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvferry.common.config import GatewayConfig
from kvferry.common.errors import ConfigError
from kvferry.services.gateway.http_tls import HttpTls
from kvferry.services.gateway.server import Server, bind, uvicorn_config


def issue(authority: trustme.CA, folder: Path) -> None:
    made = authority.issue_cert("localhost")
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")


@contextlib.asynccontextmanager
async def served(tls: HttpTls) -> AsyncIterator[str]:
    async def hello(request: Request) -> PlainTextResponse:
        return PlainTextResponse(request.url.scheme)

    listener, ready = bind("127.0.0.1", 0), asyncio.Event()
    server = Server(uvicorn_config(Starlette(routes=[Route("/", hello)]), 1.0, tls), ready.set)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await ready.wait()
        yield f"https://localhost:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        await task


async def ask(url: str, authority: trustme.CA, shows: trustme.CA | None = None) -> str:
    """ "" where the handshake fails. Each call is a new connection."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if shows is not None:
        shows.issue_cert("client@example.org").configure_cert(context)
    async with httpx.AsyncClient(verify=context, trust_env=False) as client:
        try:
            return (await client.get(url)).text
        except httpx.TransportError:
            return ""


def test_a_renewed_certificate_is_used_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = trustme.CA(), trustme.CA()

    async def scenario() -> None:
        issue(old, tmp_path)
        async with served(HttpTls(tmp_path / "cert.pem", tmp_path / "key.pem")) as url:
            assert await ask(url, old) == "https"
            assert await ask(url, new) == ""
            issue(new, tmp_path)
            assert await ask(url, new) == "https"
            assert await ask(url, old) == ""
            (tmp_path / "cert.pem").write_text("nonsense")
            with caplog.at_level(logging.ERROR, "kvferry.gateway"):
                assert await ask(url, new) == "https"
            assert "cert.pem" in caplog.text

    asyncio.run(scenario())


def test_clients_must_show_a_certificate_of_an_authority_that_is_given(tmp_path: Path) -> None:
    ours, theirs, next_ = trustme.CA(), trustme.CA(), trustme.CA()

    async def scenario() -> None:
        issue(ours, tmp_path)
        async with served(HttpTls(*(tmp_path / f"{name}.pem" for name in ("cert", "key", "ca")))) as url:
            assert await ask(url, ours, shows=ours) == "https"
            assert await ask(url, ours, shows=theirs) == ""
            assert await ask(url, ours) == ""
            next_.cert_pem.write_to_path(tmp_path / "ca.pem")
            os.utime(tmp_path / "ca.pem", (1, 1))
            assert await ask(url, ours, shows=next_) == "https"
            assert await ask(url, ours, shows=ours) == ""

    asyncio.run(scenario())


def test_files_that_cannot_be_used_are_named_at_the_start(tmp_path: Path) -> None:
    issue(trustme.CA(), tmp_path)
    (tmp_path / "bad.pem").write_text("nonsense")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    assert HttpTls.of(GatewayConfig()) is None
    for wrong, named in (
        ({"ssl_keyfile": key}, "ssl-certfile"),
        ({"ssl_certfile": str(tmp_path / "none.pem")}, "none.pem"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(tmp_path / "bad.pem")}, "bad.pem"),
        ({"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": str(tmp_path / "bad.pem")}, "bad.pem"),
    ):
        with pytest.raises(ConfigError, match=named):
            HttpTls.of(GatewayConfig(**wrong))
