"""The memory index is the specification: whatever the calls, the Redis index answers the same."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.common.errors import Unavailable
from kvferry.common.nodes import NodeLoad
from kvferry.services.index.memory import MemoryIndex
from kvferry.services.index.redis import RedisIndex, leading_runs
from tests.index.conformance import TTL_S, chain, node

_numbers = itertools.count()
_instances = st.sampled_from(["a1", "a2", "a3", "b1", "b2"])  # the letter is the node, the digit its life
_blocks = st.lists(st.integers(0, 11), max_size=12)
_calls = st.lists(
    st.one_of(
        st.tuples(st.just("announce"), _instances, st.integers(0, 9)),
        st.tuples(st.just("withdraw"), _instances),
        st.tuples(st.sampled_from(["store", "remove"]), _instances, _blocks),
        st.tuples(st.just("match"), st.integers(0, 12)),
        st.tuples(st.just("nodes")),
    ),
    max_size=40,
)


async def _apply(index, call):
    match call:
        case ("announce", instance, load):
            record = replace(node(instance, instance[0]), load=NodeLoad(num_running=load))
            try:
                return await index.announce(record, TTL_S)
            except Unavailable:
                return "refused"
        case ("withdraw", instance):
            return await index.withdraw(instance)
        case ("store" | "remove" as method, instance, blocks):
            return await getattr(index, method)(instance, [chain(12)[i] for i in blocks])
        case ("match", num_blocks):
            return await index.match(chain(12)[:num_blocks])
        case _:
            return await index.nodes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=_calls)
def test_every_sequence_of_calls_gives_the_same_answers(redis_server, calls):
    async def run() -> None:
        memory, redis = MemoryIndex(), RedisIndex(redis_server.url, f"like-{next(_numbers)}", timeout_s=20)
        try:
            for call in [*calls, ("nodes",), ("match", 12)]:
                assert await _apply(redis, call) == await _apply(memory, call), call
        finally:
            await redis.aclose()

    asyncio.run(run())


@given(
    holders=st.lists(st.none() | st.lists(st.integers(1, 2**32 - 1) | st.integers(1, 5), max_size=6), max_size=20),
    live=st.sets(st.integers(1, 5)),
)
def test_leading_runs_are_what_counting_one_by_one_gives(holders, live):
    values = [None if h is None else b"".join(n.to_bytes(4, "little") for n in h) for h in holders]
    expected = {}
    for number in live:
        run = next((i for i, held in enumerate(holders) if number not in (held or ())), len(holders))
        expected |= {number: run} if run else {}
    assert leading_runs(values, live) == expected
