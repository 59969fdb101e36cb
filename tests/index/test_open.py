from __future__ import annotations

import asyncio

import pytest

from kvferry.common.errors import ConfigError
from kvferry.services.index.memory import MemoryIndex
from kvferry.services.index.open import open_index
from kvferry.services.index.redis import RedisIndex
from kvferry.services.index.wire import redacted


@pytest.mark.parametrize("url", ["redis://localhost", "rediss://u:p@localhost:6380/1", "unix:///tmp/redis.sock?db=2"])
def test_redis_addresses_open_a_redis_index(url):
    async def run() -> None:
        index = open_index(url, "ns")
        assert isinstance(index, RedisIndex)
        await index.aclose()

    asyncio.run(run())


def test_the_memory_address_opens_a_memory_index():
    assert isinstance(open_index("memory://"), MemoryIndex)


@pytest.mark.parametrize("url", ["redi://localhost", "localhost:6379", "", "http://localhost", "redis://host:port"])
def test_an_address_that_makes_no_sense_is_refused_by_name(url):
    with pytest.raises(ConfigError) as caught:
        open_index(url)
    assert repr(url) in str(caught.value) or url in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://:secret@h?cluster=yes", "'yes' must be true or false"),
        ("redis://:secret@h/2?cluster=true", "database 0 only"),
        ("unix:///tmp/redis.sock?cluster=true", "no unix socket"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_without_its_password(url, said):
    with pytest.raises(ConfigError, match=said) as caught:
        open_index(url)
    assert "secret" not in str(caught.value)


def test_a_near_miss_is_pointed_out():
    with pytest.raises(ConfigError, match="did you mean 'redis'"):
        open_index("redi://localhost")


def test_messages_show_no_password():
    assert redacted("redis://user:secret@host:1/0") == "redis://host:1/0"
    assert redacted("unix:///tmp/redis.sock") == "unix:///tmp/redis.sock"
