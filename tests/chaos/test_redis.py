"""Each thing that can happen to Redis, on a running cluster: requests before, while it lasts, and afterwards.

`KVFERRY_CHAOS_REQUESTS` asks for more of each than the test needs, so that what it prints of times says something.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.hashing import block_names, root_name
from kvferry.services.index.redis import RedisIndex
from tests.chaos.redis_troubles import Redis
from tests.chaos.test_chaos import Chaos, ask_all, chaos, requests
from tests.e2e.cluster import cluster
from tests.e2e.reference import RETURNED_S, wait_known, wait_until

NUM_EACH = int(os.environ.get("KVFERRY_CHAOS_REQUESTS", "8"))
PHASES = ("before", "during", "after")
TROUBLES = ("killed", "hanging", "flushed", "slow", "restarted")
SEEN = ("killed", "hanging", "slow")  # by lookups that get no answer

Bodies = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def bodies() -> Bodies:
    """Of each trouble, as many for each phase."""
    return {name: requests(100 + seed, NUM_EACH * len(PHASES)) for seed, name in enumerate(TROUBLES)}


@pytest.fixture(scope="module")
def want(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, bodies: Bodies) -> dict[str, list[Any]]:
    """The same requests on one node where nothing goes wrong."""
    with cluster(tmp_path_factory.mktemp("faultless"), str(tiny_model)) as nodes:
        nodes.start_node("both")
        url = nodes.start_gateway().url
        return {name: asyncio.run(ask_all(url, some, {})) for name, some in bodies.items()}


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with chaos(tmp_path_factory.mktemp("troubled"), tiny_model, "shm,grpc", "index.lookup=delay@1:1", {}) as made:
        yield made


async def ask_timed(url: str, bodies: Sequence[dict[str, Any]]) -> tuple[list[Any], float]:
    """One after the other: what `ask_all` gives, and the median milliseconds of one."""
    answers, times = [], []
    for body in bodies:
        began = time.monotonic()
        answers += await ask_all(url, [body], {})
        times.append(1e3 * (time.monotonic() - began))
    return answers, statistics.median(times)


@pytest.mark.parametrize("name", TROUBLES)
def test_every_answer_is_right_before_while_it_lasts_and_after_and_the_index_agrees_with_the_nodes(
    running: Chaos, bodies: Bodies, want: dict[str, list[Any]], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    redis, url = Redis(running.nodes), running.gateway.url
    before, during, after = (bodies[name][NUM_EACH * n : NUM_EACH * (n + 1)] for n in range(len(PHASES)))
    failures = running.gateway.metric("kvferry:index_lookup_failures_total")

    async def run() -> list[tuple[list[Any], float]]:
        found = [await ask_timed(url, before)]
        async with getattr(redis, name)():
            found.append(await ask_timed(url, during))
        return [*found, await ask_timed(url, after)]

    found = asyncio.run(run())
    with capsys.disabled():
        print(f"\nRedis {name}: p50 of {NUM_EACH} requests each", end="")
        print(*(f", {phase} {median:.1f} ms" for phase, (_, median) in zip(PHASES, found, strict=True)), sep="")
    assert [answer for answers, _ in found for answer in answers] == want[name]
    assert name not in SEEN or running.gateway.metric("kvferry:index_lookup_failures_total") > failures
    for node in running.members:
        wait_known(running.gateway, node)
    assert running.settle() == 0, "a block has an owner"
    for node in running.members:
        wait_until(
            lambda node=node: redis.num_told_by(node) == node.record().load.accounts.cached > 0,  # type: ignore[misc]
            RETURNED_S,
            f"Redis tells of {node.name} what it holds",
        )
    asyncio.run(_check_all_found(running, [body["prompt"] for body in bodies[name]]))


async def _check_all_found(running: Chaos, prompts: Sequence[Sequence[int]]) -> None:
    """Of each prompt, somebody is known to hold all whole blocks."""
    card = running.members[0].record().card
    index = RedisIndex(running.nodes.redis_url, timeout_s=10)
    try:
        for prompt in prompts:
            names = block_names(root_name(card.model_fingerprint, card.numerics_id), prompt, card.block_size)
            assert not names or max((await index.match(names)).held.values(), default=0) == len(names)
    finally:
        await index.aclose()
