"""The index in a real Redis Cluster: as in one Redis, and with a master away the rest still tells.

All of it in a plain one, and in one that wants TLS and a password: the system's redis-server, the bundled has no TLS.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
import redis
from redis.crc import key_slot

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index import cluster_wire
from kvferry.services.index.base import Matches
from kvferry.services.index.keys import NUM_TAGS, Keys
from kvferry.services.index.open import open_index
from tests.index.conformance import CHECKS, TTL_S, chain, node
from tests.index.redis_cluster import RedisCluster, Secured
from tests.index.servers import binaries

_numbers = itertools.count()


@pytest.fixture(scope="module", params=["plain", "tls"])
def redis_cluster(request, tmp_path_factory):
    folder, secured = tmp_path_factory.mktemp("redis-cluster"), None
    if request.param == "tls":
        if "system" not in binaries():
            pytest.skip("no redis-server of the system: only that one has TLS")
        secured = Secured(folder)
    cluster = RedisCluster(list(binaries().values())[-1], folder, secured)
    yield cluster
    cluster.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_it_keeps_what_every_index_promises(check, redis_cluster):
    async def run() -> None:
        namespace, opened = f"cluster-{next(_numbers)}", []

        def connect():
            opened.append(open_index(redis_cluster.url, namespace, timeout_s=20))
            return opened[-1]

        try:
            await check(connect)
        finally:
            for index in opened:
                await index.aclose()

    asyncio.run(run())


def test_every_master_has_the_same_share_of_a_chain():
    tags = Keys("ns", is_cluster=True).by_tag(chain(4000))
    assert sorted(key_slot(tag.encode()) * NUM_TAGS // 16384 for tag in tags) == list(range(NUM_TAGS))
    assert all(150 < len(positions) < 350 for positions in tags.values())


@pytest.mark.parametrize("has_the_nodes", [False, True], ids=["of blocks alone", "of the node records"])
def test_a_master_that_is_killed_and_comes_back_empty(redis_cluster, has_the_nodes):
    async def run() -> None:
        namespace = f"cluster-{next(_numbers)}"
        nodes_at = redis_cluster.master_of(key_slot(namespace.encode()))
        victim = nodes_at if has_the_nodes else next(port for port in redis_cluster.ports if port != nodes_at)
        index = open_index(redis_cluster.url, namespace, timeout_s=5)
        names = chain(200)
        try:
            await index.announce(node("a"), TTL_S)
            await index.store("a", names)
            await index.expect("a", names, TTL_S)
            assert await index.match(names) == Matches({"a": 200}, {"a": 200})
            (tag,) = Keys(namespace, is_cluster=True).by_tag(names[:1])
            is_forgotten = victim == redis_cluster.master_of(key_slot(tag.encode()))
            redis_cluster.kill(victim)
            found = await index.match(names)
            assert 190 < found.held["a"] <= 200
            assert found.coming == ({} if is_forgotten else {"a": 200})
            assert (await index.match(chain(200, salt="unknown"))).held == {}
            with pytest.raises(IndexUnavailable):
                await index.store("a", names)
            redis_cluster.start(victim)
            for _ in range(1200):
                if await _is_known_again(index, names):
                    break
                await asyncio.sleep(0.05)  # a heartbeat
            assert (await index.match(names)).held == {"a": 200}
        finally:
            await index.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("has_the_nodes", [False, True], ids=["of blocks alone", "of the node records"])
def test_a_master_that_hangs_is_waited_for_once_and_the_others_answer(redis_cluster, has_the_nodes, monkeypatch):
    monkeypatch.setattr(cluster_wire, "PAUSE_S", 3600)

    async def run() -> None:
        namespace = f"cluster-{next(_numbers)}"
        nodes_at = redis_cluster.master_of(key_slot(namespace.encode()))
        victim = nodes_at if has_the_nodes else next(port for port in redis_cluster.ports if port != nodes_at)
        index = open_index(redis_cluster.url, namespace, timeout_s=60)
        index._patience_s = 1.0  # the others' time on a slow machine
        wire, names = index._wire, chain(200)
        try:
            await index.announce(node("a"), TTL_S)
            await index.store("a", names)
            assert (await index.match(names)).held == {"a": 200}
            with redis_cluster.frozen(victim):
                for _ in range(20):
                    assert 190 < (await index.match(names)).held["a"] <= 200
                assert {port for _, port in wire._silent_until} == {victim}
                assert len(wire._asking) == 1, "later lookups wait for it, too"
            while wire._asking:
                await asyncio.wait(wire._asking)
            assert wire._silent_until == {}, "its late answer has not been noticed"
            assert (await index.match(names)).held == {"a": 200}
        finally:
            await index.aclose()

    asyncio.run(run())


def test_a_slot_on_its_way_to_another_master_is_asked_for_there(redis_cluster):
    async def run() -> None:
        namespace = f"cluster-{next(_numbers)}"
        index = open_index(redis_cluster.url, namespace, timeout_s=20)
        names = chain(1)
        (tag,) = Keys(namespace, is_cluster=True).by_tag(names)
        slot = key_slot(tag.encode())
        source = redis_cluster.master_of(slot)
        target = next(port for port in redis_cluster.ports if port != source)
        try:
            await index.announce(node("a"), TTL_S)
            await index.store("a", names)
            redis_cluster.move_keys(slot, source, target)
            assert (await index.match(names)).held == {"a": 1}
            await index.store("a", names)
            redis_cluster.finish_move(slot, source, target)
            assert (await index.match(names)).held == {"a": 1}
            await index.remove("a", names)
            assert (await index.match(names)).held == {}
        finally:
            await index.aclose()

    asyncio.run(run())


def test_a_password_opens_every_master_and_without_it_none_does(redis_cluster):
    plain = redis_cluster.url.replace(":secret@", "")

    async def run() -> None:
        namespace, names = f"cluster-{next(_numbers)}", chain(200)
        open_one = open_index(plain.replace("//", "//:secret@"), namespace, timeout_s=20)
        shut_out = open_index(plain, namespace, timeout_s=20)
        try:
            await open_one.announce(node("a"), TTL_S)
            await open_one.store("a", names)
            assert (await open_one.match(names)).held == {"a": 200}
            with pytest.raises(IndexUnavailable, match=r"(?i)auth"):
                await shut_out.match(names)
        finally:
            await open_one.aclose()
            await shut_out.aclose()

    if redis_cluster.secured:
        return asyncio.run(run())
    for port in redis_cluster.ports:
        redis_cluster.admin(port).config_set("requirepass", "secret")
    try:
        asyncio.run(run())
    finally:
        for port in redis_cluster.ports:
            redis.Redis(port=port, password="secret").config_set("requirepass", "")


@pytest.mark.parametrize("redis_cluster", ["tls"], indirect=True)
def test_a_cluster_whose_certificates_an_unknown_authority_has_signed_is_refused(redis_cluster, tmp_path):
    url = redis_cluster.url.replace(str(redis_cluster.secured.authority), str(Secured(tmp_path).authority))

    async def run() -> None:
        index = open_index(url, timeout_s=20)
        try:
            with pytest.raises(IndexUnavailable, match=r"(?i)certificate verify failed") as caught:
                await index.nodes()
            assert "secret" not in str(caught.value)
            with pytest.raises(IndexUnavailable, match=r"(?i)certificate verify failed"):
                await index.match(chain(4))
        finally:
            await index.aclose()

    asyncio.run(run())


async def _is_known_again(index, names) -> bool:
    """What a node does with each heartbeat; everything is stored once, when it is asked for."""
    try:
        if not await index.announce(node("a"), TTL_S):
            return False
        await index.store("a", names)
    except IndexUnavailable:
        return False
    return True
