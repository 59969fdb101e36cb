"""A real Redis that wants TLS and a password. The bundled one has no TLS, a redis-server of the system has."""

from __future__ import annotations

import asyncio
import ssl
import subprocess

import pytest
import redis

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index.open import open_index
from tests.index.conformance import TTL_S, chain, node
from tests.index.redis_cluster import Secured, free_ports
from tests.index.servers import binaries


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """Its address, and what it was given."""
    binary = binaries().get("system")
    if binary is None:
        pytest.skip("no redis-server of the system: only that one has TLS")
    folder = tmp_path_factory.mktemp("redis-tls")
    secured, (port,) = Secured(folder), free_ports(1)
    command = [binary, *secured.flags(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "Ready to accept connections" in line:
            break
    else:
        pytest.skip("the system's redis-server has no TLS")
    yield f"127.0.0.1:{port}", secured
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_index_works_over_tls_with_a_password(secured):
    address, given = secured

    async def run() -> None:
        index = open_index(given.url(address), timeout_s=20)
        await index.announce(node("a"), TTL_S)
        await index.store("a", chain(3))
        assert (await index.match(chain(4))).held == {"a": 3}
        await index.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("user", [":wrong@", ""], ids=["wrong password", "no password"])
def test_a_refused_password_is_said_without_it(secured, user):
    address, given = secured
    with pytest.raises(IndexUnavailable) as caught:
        asyncio.run(_nodes(given.url(address).replace(":secret@", user)))
    assert "wrong@" not in str(caught.value)
    assert (
        isinstance(caught.value.__cause__, redis.AuthenticationError)
        or "NOAUTH" in str(caught.value)
        or ("Authentication required" in str(caught.value))
    )


def test_a_certificate_of_an_unknown_authority_is_refused(secured):
    address, _ = secured
    with pytest.raises(IndexUnavailable, match=r"(?i)certificate"):
        asyncio.run(_nodes(f"rediss://:secret@{address}?ssl_ca_certs={ssl.get_default_verify_paths().openssl_cafile}"))


async def _nodes(url: str) -> None:
    index = open_index(url, timeout_s=20)
    try:
        await index.nodes()
    finally:
        await index.aclose()
        for _ in range(2000):  # TLS says goodbye, and waits for the answer
            if len(asyncio.get_running_loop()._selector.get_map()) == 1:
                break
            await asyncio.sleep(0.01)
