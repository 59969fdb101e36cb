"""Limits of an API key over several gateways and one real Redis: what they share, and what they do without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from kvferry.services.gateway.api_keys import ApiKeys, RateLimited, Tenant, new_key
from kvferry.services.gateway.guard import Guard
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.shared_usage import PAUSE_S, SharedUsage
from kvferry.services.index.open import open_asker
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import eventually, gateway
from tests.index.servers import RedisServer, binaries

KEY, LINE = new_key("alice")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(binaries()["bundled"], tmp_path_factory.mktemp("redis"))
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _empty(server: RedisServer) -> None:
    server.admin.flushall()


class Gateway:
    """What a gateway has of it: the shared usage, and a tenant of its own for the same key."""

    def __init__(self, server: RedisServer, limits: str, lease_s: float = 60.0, timeout_s: float = 5.0) -> None:
        self.tenant: Tenant = ApiKeys(f"{LINE} {limits}").tenant(KEY)
        self.usage = SharedUsage(open_asker(server.url, timeout_s=timeout_s), lease_s=lease_s)

    async def admit(self) -> None:
        await self.usage.admit(self.tenant)

    async def release(self, num_tokens: int = 0) -> None:
        await self.usage.release(self.tenant, num_tokens)


@asynccontextmanager
async def gateways(*made: Gateway) -> AsyncIterator[tuple[Gateway, ...]]:
    try:
        yield made
    finally:
        for each in made:
            await each.usage.aclose()


def test_requests_in_flight_count_on_all_gateways_together_and_are_given_back(server: RedisServer) -> None:
    async def scenario() -> None:
        async with gateways(Gateway(server, "max_in_flight=3"), Gateway(server, "max_in_flight=3")) as (a, b):
            await a.admit()
            await a.admit()
            await b.admit()
            for one in (a, b, a):
                with pytest.raises(RateLimited, match="3 requests in flight"):
                    await one.admit()
            await a.release()
            await b.admit()
            with pytest.raises(RateLimited):
                await a.admit()
            for one in (a, b, b):
                await one.release()
            taken = await asyncio.gather(*(one.admit() for one in (a, b) * 4), return_exceptions=True)
            assert [type(found) for found in taken].count(RateLimited) == 5

    asyncio.run(scenario())


def test_what_a_dead_gateway_had_in_flight_is_given_back_when_its_lease_ends(server: RedisServer) -> None:
    async def scenario() -> None:
        dying = Gateway(server, "max_in_flight=2")
        async with gateways(dying, Gateway(server, "max_in_flight=2")) as (a, b):
            await a.admit()
            await a.admit()
            with pytest.raises(RateLimited):
                await b.admit()
            a.usage._lease_s = 0.05
            renewing = asyncio.create_task(a.usage.renew())
            await eventually(lambda: lease_ms(server) < 1000)
            renewing.cancel()  # its last sign of life
            await eventually_admitted(b)
            await b.admit()
            with pytest.raises(RateLimited):
                await b.admit()

    def lease_ms(server: RedisServer) -> float:
        (value,) = server.admin.hgetall(key(server)).values()
        now, more = server.admin.time()
        return int(value.split()[2]) - now * 1000 - more / 1000

    asyncio.run(scenario())


def key(server: RedisServer) -> bytes:
    (found,) = server.admin.keys("kvferry:key:*")
    return found


async def eventually_admitted(one: Gateway) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                return await one.admit()
            except RateLimited:
                await asyncio.sleep(0.02)


def test_a_living_gateways_leases_are_renewed(server: RedisServer) -> None:
    async def scenario() -> None:
        short = Gateway(server, "max_in_flight=1", lease_s=3.0)
        async with gateways(short, Gateway(server, "max_in_flight=1")) as (a, b):
            await a.admit()
            began = server.admin.hgetall(key(server))
            renewing = asyncio.create_task(a.usage.renew())
            await eventually(lambda: server.admin.hgetall(key(server)) != began)
            with pytest.raises(RateLimited):
                await b.admit()
            renewing.cancel()

    asyncio.run(scenario())


def test_requests_and_tokens_per_minute_are_shared_and_refill(server: RedisServer) -> None:
    async def scenario() -> None:
        limits = "rpm=60 tpm=6000"
        async with gateways(Gateway(server, limits), Gateway(server, limits)) as (a, b):
            for one in (a, b) * 3:
                await one.admit()
                await one.release(50)
            await b.admit()
            assert 53 <= int(b.tenant.headers()["x-ratelimit-remaining-requests"]) < 60
            assert int(b.tenant.headers()["x-ratelimit-limit-tokens"]) == 6000
            await b.release(9000)
            with pytest.raises(RateLimited, match="6000 tokens per minute") as caught:
                await a.admit()
            assert 10 <= caught.value.retry_after_s <= 34, "3,300 too many, 100 come back each second"
            assert 0 < server.admin.pttl(key(server)) <= 100_000

    asyncio.run(scenario())


@pytest.mark.parametrize("how", ["frozen", "refuses"])
def test_without_redis_each_gateway_holds_the_key_to_its_limits_by_itself(
    server: RedisServer, tmp_path: Path, how: str
) -> None:
    async def scenario() -> None:
        limits, now = "max_in_flight=2 tpm=1000", 1000.0
        async with gateways(Gateway(server, limits, timeout_s=0.1), Gateway(server, limits, timeout_s=5.0)) as (a, b):
            a.usage._clock = lambda: now
            await a.admit()
            if how == "frozen":
                with server.frozen():
                    await alone(a)
            else:
                server.admin.config_set("maxmemory", 1)
                server.admin.config_set("maxmemory-policy", "noeviction")
                try:
                    await alone(a)
                finally:
                    server.admin.config_set("maxmemory", 0)
            with pytest.raises(RateLimited, match="tokens"):
                await a.admit()
            now += PAUSE_S
            await a.release()
            with pytest.raises(RateLimited, match="tokens"):  # it is told what was used meanwhile
                await b.admit()

    async def alone(a: Gateway) -> None:
        await a.admit()
        with pytest.raises(RateLimited, match="2 requests in flight"):
            await a.admit()
        await a.release(5000)

    asyncio.run(scenario())


def test_two_gateways_hold_a_key_to_one_limit_and_the_end_of_an_answer_frees_it(server: RedisServer) -> None:
    options = {"api_keys": f"{LINE} max_in_flight=1", "redis_url": server.url, "index_timeout_s": 5.0}

    async def scenario() -> None:
        hanging, quick = FakeDecode(Behaviour(hang_after=1)), FakeDecode(Behaviour())
        async with gateway(hanging, **options) as one, gateway(quick, **options) as two:
            for setup in (one, two):
                setup.client.headers["authorization"] = f"Bearer {KEY}"
            running = asyncio.create_task(one.complete("Hello"))
            await eventually(lambda: bool(hanging.submitted))
            refused = await two.complete("Hello")
            assert refused.status_code == 429
            assert "1 requests in flight" in refused.json()["error"]["message"]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            hanging.behaviour = Behaviour()
            for setup in (two, one) * 5:  # whoever has an answer may ask elsewhere at once
                assert (await setup.complete("Hello", max_tokens=4)).status_code == 200
                assert (await setup.complete("Hello", temperature=-1)).status_code == 400
                answer = await setup.complete("Hello", max_tokens=4, stream=True)
                assert answer.text.endswith("data: [DONE]\n\n")

    asyncio.run(scenario())


def test_a_request_has_been_counted_out_before_the_end_of_its_answer_leaves(server: RedisServer) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for more in (True, False):
            await send({"type": "http.response.body", "body": b"x", "more_body": more})

    async def scenario() -> None:
        in_flight: list[int] = []
        async with gateways(Gateway(server, "max_in_flight=1")) as (one,):
            keys = ApiKeys(f"{LINE} max_in_flight=1")
            guarded = Guard(app, keys, one.usage, GatewayMetrics(CollectorRegistry()))

            async def send(message: Message) -> None:
                if message["type"] == "http.response.body":
                    in_flight.append(len(server.admin.keys("kvferry:key:*")))

            headers = [(b"authorization", f"Bearer {KEY}".encode())]
            await guarded(
                {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}, never, send
            )
        assert in_flight == [1, 0]

    async def never() -> Message:
        raise AssertionError("nobody reads the body")

    asyncio.run(scenario())
