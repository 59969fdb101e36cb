"""Redis away, hung, flushed, restarted or late: a prompt error, no wrong answer, and right again by itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time

import pytest

from kvferry.common.errors import ConfigError, IndexUnavailable
from kvferry.services.index.base import MAX_EXPECTED, Matches
from kvferry.services.index.redis import RedisIndex
from tests.index.conformance import TTL_S, chain, node
from tests.index.servers import RedisServer, binaries, late_proxy

_numbers = itertools.count()
TIMEOUT_S = 0.3


@contextlib.asynccontextmanager
async def opened(url, timeout_s=TIMEOUT_S, namespace=None):
    index = RedisIndex(url, namespace or f"failures-{next(_numbers)}", timeout_s=timeout_s)
    try:
        yield index
    finally:
        await index.aclose()


@contextlib.asynccontextmanager
async def with_a_node(url, **options):
    async with opened(url, **options) as index:
        await index.announce(node("a"), TTL_S)
        await index.store("a", chain(8))
        yield index


async def every_call(index):
    """The errors of all methods, called at once."""
    calls = (
        index.announce(node("a"), TTL_S),
        index.withdraw("x"),
        index.nodes(),
        index.store("a", chain(8)),
        index.remove("a", chain(8)),
        index.expect("a", chain(8), TTL_S),
        index.match(chain(8)),
    )
    return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "unix:///nowhere/redis.sock", "redis://:secret@127.0.0.1:1/2"])
def test_no_redis_is_said_at_once_and_without_the_password(url):
    async def run() -> None:
        async with opened(url) as index:
            begun = time.monotonic()
            errors = await every_call(index)
            assert all(isinstance(error, IndexUnavailable) for error in (*errors[:3], *errors[5:]))
            assert errors[3:5] == [None, None]  # updates of an instance that was never announced
            assert time.monotonic() - begun < TIMEOUT_S + 0.5
            assert "secret" not in str(errors)

    asyncio.run(run())


def test_a_redis_that_hangs_costs_one_timeout_and_heals(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url) as index:
            with redis_server.frozen():
                for _ in range(2):  # the second time without an open connection
                    begun = time.monotonic()
                    errors = await every_call(index)
                    assert all(isinstance(error, IndexUnavailable) for error in errors), errors
                    assert time.monotonic() - begun < TIMEOUT_S + 0.5
            await index.announce(node("a"), TTL_S)
            await index.store("a", chain(8))
            assert (await index.match(chain(8))).held == {"a": 8}

    asyncio.run(run())


def test_more_callers_than_connections_all_get_an_answer_in_time_when_redis_hangs(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url) as index:
            with redis_server.frozen():
                begun = time.monotonic()
                errors = await asyncio.gather(*(index.match(chain(8)) for _ in range(200)), return_exceptions=True)
                assert all(isinstance(error, IndexUnavailable) for error in errors)
                assert time.monotonic() - begun < TIMEOUT_S + 1
            assert (await index.match(chain(8))).held == {"a": 8}

    asyncio.run(run())


def test_a_lookup_cancelled_in_mid_flight_never_answers_another(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url, timeout_s=10) as index:
            with redis_server.frozen():
                tasks = [asyncio.create_task(index.match(chain(8))) for _ in range(10)]
                await asyncio.sleep(0.1)
                for task in tasks:
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert all(isinstance(result, asyncio.CancelledError) for result in results)
            assert (await index.match(chain(3))).held == {"a": 3}
            assert (await index.match(chain(4, salt="unknown"))).held == {}

    asyncio.run(run())


def test_answers_stay_right_while_callers_give_up_at_random_moments(redis_server):
    async def run() -> None:
        randoms = random.Random(7)
        async with late_proxy(redis_server.socket, lambda: 0.02) as url, with_a_node(url, timeout_s=10) as index:

            async def ask(num_blocks: int, patience_s: float) -> None:
                try:
                    async with asyncio.timeout(patience_s):
                        assert (await index.match(chain(num_blocks))).held == {"a": num_blocks}
                except TimeoutError:
                    pass

            asks = [ask(randoms.randint(1, 8), randoms.choice((0.001, 0.01, 0.02, 0.021, 0.03, 5))) for _ in range(300)]
            for start in range(0, len(asks), 20):
                await asyncio.gather(*asks[start : start + 20])

    asyncio.run(run())


def test_a_flushed_redis_is_right_again_after_the_next_announces(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url) as index:
            await index.announce(node("b"), TTL_S)
            await index.expect("a", chain(8), TTL_S)
            redis_server.admin.flushall()
            assert (await index.nodes()).records == []
            assert await index.match(chain(8)) == Matches({}, {})
            await index.expect("a", chain(8), TTL_S)
            await index.store("a", chain(8))  # before the announce: must not count for whoever comes next
            assert await index.announce(node("b"), TTL_S) is True
            assert await index.match(chain(8)) == Matches({}, {})
            assert await index.announce(node("a"), TTL_S) is True
            assert await index.match(chain(8)) == Matches({}, {"a": 8})
            await index.store("a", chain(8))
            assert (await index.match(chain(8))).held == {"a": 8}

    asyncio.run(run())


def test_forgotten_scripts_are_loaded_again(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url) as index:
            redis_server.admin.script_flush()
            await index.expect("a", chain(8), TTL_S)
            redis_server.admin.script_flush()
            assert await index.match(chain(8)) == Matches({"a": 8}, {"a": 8})

    asyncio.run(run())


def test_a_restarted_redis_is_found_again(tmp_path):
    server = RedisServer(binaries()["bundled"], tmp_path)

    async def run() -> None:
        async with with_a_node(server.url, timeout_s=5) as index:
            server.stop()
            with pytest.raises(IndexUnavailable):
                await index.match(chain(8))
            server.start()
            assert (await index.match(chain(8))).held == {}
            assert await index.announce(node("a"), TTL_S) is True

    try:
        asyncio.run(run())
    finally:
        server.stop()


def test_an_error_of_redis_is_an_unavailable_index(redis_server):
    async def run() -> None:
        async with opened(redis_server.url, namespace="taken") as index:
            redis_server.admin.set("{taken}:nodes", "not a set")
            with pytest.raises(IndexUnavailable, match="WRONGTYPE"):
                await index.nodes()

    asyncio.run(run())


def test_block_entries_expire_and_a_store_renews_them(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url, namespace="expiry") as index:
            keys = list(redis_server.admin.scan_iter("expiry:b:*"))
            assert len(keys) == 8
            assert all(3_500_000 < redis_server.admin.pttl(key) <= 3_600_000 for key in keys)
            redis_server.admin.pexpire(keys[0], 1000)
            await index.store("a", chain(8))
            assert redis_server.admin.pttl(keys[0]) > 3_500_000
            await index.announce(node("b"), TTL_S)
            await index.store("b", chain(8))
            await index.remove("b", chain(8))
            assert redis_server.admin.pttl(keys[0]) > 3_500_000
            await index.remove("a", chain(8))
            assert list(redis_server.admin.scan_iter("expiry:b:*")) == []

    asyncio.run(run())


def test_what_is_expected_takes_bounded_room_however_long_and_many_the_prompts_and_ends_with_the_last_of_them(
    redis_server,
):
    async def run() -> None:
        async with with_a_node(redis_server.url, namespace="soon") as index:
            names = chain(8000)
            for end in range(3 * MAX_EXPECTED):
                await index.expect("a", names[: 8000 - end], 1 + end)
            (key,) = redis_server.admin.scan_iter("soon:soon:*")
            members = redis_server.admin.zrange(key, 0, -1)
            assert len(members) == MAX_EXPECTED
            assert all(len(member) < 1100 for member in members)
            assert redis_server.admin.memory_usage(key, samples=0) < 1500 * MAX_EXPECTED
            assert 2 * MAX_EXPECTED * 1000 < redis_server.admin.pttl(key) <= 3 * MAX_EXPECTED * 1000

    asyncio.run(run())


def test_after_a_flush_the_memory_is_another_one_whoever_is_back(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url) as index:
            memories = [(await index.nodes()).memory]
            for back in ((), ("a",), ("a", "b")):
                redis_server.admin.flushall()
                for name in back:
                    await index.announce(node(name), TTL_S)
                found = await index.nodes()
                assert len(found.records) == len(back)
                memories.append(found.memory)
            assert len(set(memories)) == len(memories)

    asyncio.run(run())


def test_the_memory_lives_as_long_as_the_longest_lease_and_so_not_in_an_old_copy(redis_server):
    async def run() -> None:
        async with opened(redis_server.url, namespace="copy") as index:
            for name, ttl_s in (("a", 60), ("b", 10)):
                await index.announce(node(name), ttl_s)
            assert 10_000 < redis_server.admin.pttl("{copy}:memory") <= 60_000

    asyncio.run(run())


def test_a_record_of_another_version_is_left_out(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url, namespace="versions") as index:
            await index.announce(node("b"), TTL_S)
            redis_server.admin.hset("{versions}:node:node-b", "record", '{"instance_id": "b", "colour": "red"}')
            assert [record.instance_id for record in (await index.nodes()).records] == ["a"]

    asyncio.run(run())


def test_namespaces_do_not_see_each_other(redis_server):
    async def run() -> None:
        async with with_a_node(redis_server.url, namespace="one"), opened(redis_server.url, namespace="two") as other:
            assert (await other.nodes()).records == []
            assert (await other.match(chain(8))).held == {}

    asyncio.run(run())


@pytest.mark.parametrize("namespace", ["", "a{b}", "a b"])
def test_a_namespace_that_would_break_the_keys_is_refused(namespace):
    with pytest.raises(ConfigError, match="namespace"):
        RedisIndex("redis://127.0.0.1", namespace)
