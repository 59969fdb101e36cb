"""The memory index is the specification: whatever the calls and whatever the wire does to them, the Redis index answers
the same. What a node holds is closed under prefix.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.common.errors import Unavailable
from kvferry.common.nodes import NodeLoad
from kvferry.services.index.memory import MemoryIndex
from kvferry.services.index.redis import RedisIndex
from kvferry.services.index.runs import leading, packed
from tests.index.conformance import TTL_S, chain, node

_numbers = itertools.count()
_instances = st.sampled_from(["a1", "a2", "a3", "b1", "b2"])  # the letter is the node, the digit its life
_calls = st.lists(
    st.one_of(
        st.tuples(st.just("announce"), _instances, st.integers(0, 9)),
        st.tuples(st.just("withdraw"), _instances),
        st.tuples(st.sampled_from(["store", "remove"]), _instances, st.integers(0, 12)),
        st.tuples(st.just("match"), st.integers(0, 12)),
        st.tuples(st.just("expect"), _instances, st.sampled_from([0, 5, 12])),  # fewer than are forgotten
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
        case ("store", instance, num_blocks):
            return await index.store(instance, chain(12)[:num_blocks])
        case ("remove", instance, num_blocks):  # children before parents
            return await index.remove(instance, chain(12)[num_blocks:])
        case ("expect", instance, num_blocks):
            return await index.expect(instance, chain(12)[:num_blocks], TTL_S)
        case ("match", num_blocks):
            return await index.match(chain(12)[:num_blocks])
        case _:
            return (await index.nodes()).records


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
    ends=st.dictionaries(st.integers(1, 9), st.integers(0, 20)),
    live=st.sets(st.integers(1, 9)),
    told=st.sets(st.integers(0, 19)),
)
def test_runs_are_right_as_far_as_the_holders_are_told(ends, live, told):
    told |= {0, *ends.values(), *(end - 1 for end in ends.values())} - {-1}
    holders = [(i, b"".join(packed(n) for n, end in sorted(ends.items()) if i < end)) for i in sorted(told)]
    assert leading(holders, live) == {n: end for n, end in ends.items() if end and n in live}
