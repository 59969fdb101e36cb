"""Mutual TLS between processes: who gets in, who does not, and certificates that change."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.common.config import ClusterConfig
from kvferry.common.errors import ConfigError
from kvferry.services.rpc.aio import Dial, Server, dialer
from kvferry.services.rpc.tls import Tls
from tests.e2e.cluster import cluster

NAME = "kvferry.internal"


def issue(authority: trustme.CA, folder: Path, *names: str) -> dict[str, str]:
    """Writes a certificate for these names; the options that use it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = authority.issue_cert(*names)
    made.private_key_pem.write_to_path(folder / "key.pem")
    made.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return {f"rpc_tls_{kind}": str(folder / f"{kind}.pem") for kind in ("cert", "key", "ca")}


def tls(authority: trustme.CA, folder: Path, *names: str, server_name: str | None = None) -> Tls:
    made = Tls.of(ClusterConfig(**issue(authority, folder, *names), rpc_tls_server_name=server_name))
    assert made is not None
    return made


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@contextlib.asynccontextmanager
async def served(identity: Tls) -> AsyncIterator[str]:
    server = Server(lambda raw: None, (), identity)
    port = await server.start("127.0.0.1", 0)
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def healthy(dial: Dial, address: str) -> bool:
    """False when the connection is refused."""
    async with dial(address) as channel:
        try:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as exc:
            if exc.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def test_one_of_the_same_authority_gets_in_and_others_do_not(authority: trustme.CA, tmp_path: Path) -> None:
    stranger = tls(trustme.CA(), tmp_path / "stranger", "127.0.0.1")
    (tmp_path / "stranger/ca.pem").write_bytes((authority.cert_pem).bytes())  # believes the server, is not believed
    anonymous = grpc.ssl_channel_credentials(authority.cert_pem.bytes())

    async def scenario() -> None:
        async with served(tls(authority, tmp_path / "node", "127.0.0.1")) as address:
            assert await healthy(dialer(tls(authority, tmp_path / "peer", "peer")), address)
            assert not await healthy(dialer(stranger), address)
            assert not await healthy(dialer(None), address)
            assert not await healthy(lambda a: grpc.aio.secure_channel(a, anonymous), address)

    asyncio.run(scenario())


def test_a_node_must_prove_its_address_or_the_common_name(authority: trustme.CA, tmp_path: Path) -> None:
    peer, named = tls(authority, tmp_path / "a", "peer"), tls(authority, tmp_path / "b", "peer", server_name=NAME)

    async def scenario() -> None:
        async with served(tls(authority, tmp_path / "node", NAME)) as address:
            assert not await healthy(dialer(peer), address)
            assert await healthy(dialer(named), address)

    asyncio.run(scenario())


def test_a_renewed_certificate_is_used_without_a_restart(authority: trustme.CA, tmp_path: Path) -> None:
    renewed = trustme.CA()
    identity = tls(authority, tmp_path / "node", "127.0.0.1")

    async def scenario() -> None:
        async with served(identity) as address:
            assert await healthy(dialer(tls(authority, tmp_path / "old", "peer")), address)
            fresh = dialer(tls(renewed, tmp_path / "new", "peer"))
            assert not await healthy(fresh, address)
            identity.key.write_text("half a file")  # in the middle of being replaced: the old one goes on
            assert await healthy(dialer(tls(authority, tmp_path / "old", "peer")), address)
            issue(renewed, tmp_path / "node", "127.0.0.1")
            assert await healthy(fresh, address)

    asyncio.run(scenario())


def test_options_that_do_not_fit_together_are_named(authority: trustme.CA, tmp_path: Path) -> None:
    assert Tls.of(ClusterConfig()) is None
    files = issue(authority, tmp_path, "127.0.0.1")
    with pytest.raises(ConfigError, match="rpc-tls-key missing"):
        Tls.of(ClusterConfig(**{k: v for k, v in files.items() if k != "rpc_tls_key"}))
    with pytest.raises(ConfigError, match="rpc-tls-server-name is set without"):
        Tls.of(ClusterConfig(rpc_tls_server_name=NAME))
    with pytest.raises(ConfigError, match=r"absent\.pem: No such file"):
        Tls.of(ClusterConfig(**files | {"rpc_tls_ca": str(tmp_path / "absent.pem")}))
    (tmp_path / "key.pem").write_text("secret")
    with pytest.raises(ConfigError, match=r"key\.pem is not PEM"):
        Tls.of(ClusterConfig(**files))


def test_a_cluster_talks_and_moves_blocks_over_tls(authority: trustme.CA, tiny_model: Path, tmp_path: Path) -> None:
    files = issue(authority, tmp_path / "tls", NAME)
    flags = [part for name, path in files.items() for part in (f"--{name.replace('_', '-')}", path)]
    flags += ["--rpc-tls-server-name", NAME]
    with cluster(tmp_path, str(tiny_model)) as nodes:
        nodes.start_node("prefill", "--transports", "grpc", *flags, wait=False)
        remote = ("--transports", "grpc", "--local-prefill-max-tokens", "16")
        decode = nodes.start_node("decode", *remote, *flags, wait=False)
        gateway = nodes.start_gateway(*flags)
        body = {"model": "test", "prompt": list(range(3, 300)), "max_tokens": 4, "temperature": 0}
        reply = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        assert "pulls over grpc" in decode.log.read_text()
        assert all(node["live"] for node in gateway.get("/cluster")["nodes"])
        assert not asyncio.run(healthy(dialer(None), decode.address))
