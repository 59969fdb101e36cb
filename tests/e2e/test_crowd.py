"""Many requests at once: each gets its own answer, and none keeps the others out."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.common.requests import GenerateRequest, SamplingParams
from tests.e2e import test_resume
from tests.e2e.cluster import Cluster, DecodeClient, Gateway, Node, cluster
from tests.e2e.reference import Lone, Reply, new_prompt, num_received, wait_clean, wait_known, wait_until
from tests.e2e.streams import ask as streamed

NUM_AT_ONCE = 24


@dataclass
class Split:
    prefill: Node
    decode: Node
    gateway: Gateway


def start(nodes: Cluster, *flags: str) -> Split:
    prefill = nodes.start_node("prefill", wait=False)
    decode = nodes.start_node("decode", "--local-prefill-max-tokens", "16", *flags)
    nodes.wait_node(prefill)
    return Split(prefill, decode, nodes.start_gateway())


@pytest.fixture
def nodes(tiny_model: Path, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, str(tiny_model)) as made:
        yield made


async def ask(client: httpx.AsyncClient, gateway: Gateway, prompt: list[int], **fields: Any) -> Reply:
    body = {"model": "test", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    reply = await client.post(f"{gateway.url}/v1/completions", json=body | fields)
    assert reply.status_code == httpx.codes.OK, reply.text
    (choice,) = reply.json()["choices"]
    return Reply(choice["text"], tuple(choice["logprobs"]["token_logprobs"]))


def test_24_different_prompts_at_once_each_equal_their_solo_run(nodes: Cluster, lone: Lone) -> None:
    rng = random.Random(24)
    prompts = [new_prompt(rng.randrange(5, 600)) for _ in range(NUM_AT_ONCE)]
    want = [lone(prompt) for prompt in prompts]
    split = start(nodes)

    async def all_at_once() -> list[Reply]:
        async with httpx.AsyncClient(timeout=120) as client:
            return await asyncio.gather(*(ask(client, split.gateway, prompt) for prompt in prompts))

    assert asyncio.run(all_at_once()) == want
    assert num_received(split.decode) > 0
    wait_clean(split.prefill, split.decode)


def test_a_request_that_needs_most_of_the_pool_is_not_starved_by_small_ones_that_never_stop_coming(
    nodes: Cluster, lone: Lone
) -> None:
    """Three small ones fill the pool, twelve are always there, and the big one fits only where two have left."""
    split = start(nodes, "--num-blocks-override", "64")
    big, salts = new_prompt(600), itertools.count()
    small, want = new_prompt(250), lone(big)

    async def run() -> tuple[Reply, int]:
        async with httpx.AsyncClient(timeout=120) as client, asyncio.TaskGroup() as tasks:
            is_over, num_small = asyncio.Event(), 0

            async def small_ones() -> None:
                nonlocal num_small
                while not is_over.is_set():
                    await ask(client, split.gateway, small, max_tokens=40, cache_salt=f"{next(salts)}")
                    num_small += 1

            crowd = [tasks.create_task(small_ones()) for _ in range(12)]
            while split.decode.record().load.num_waiting < 6:  # noqa: ASYNC110 (it happens in another process)
                await asyncio.sleep(0.01)
            before = num_small
            asking = tasks.create_task(ask(client, split.gateway, big))
            while not asking.done():
                await asyncio.sleep(0.01)
                assert num_small - before < 150, "the big one starves"
            is_over.set()
            await asyncio.gather(*crowd)
        return asking.result(), num_small - before

    got, num_small = asyncio.run(run())
    assert got == want
    assert num_small > 0, "the small ones were kept out"
    wait_clean(split.prefill, split.decode)


def test_streams_that_are_preempted_tell_what_they_tell_with_room_for_all(nodes: Cluster) -> None:
    """Greedy, with penalties, echo, three choices, stop strings and bad words: in pools of 2,000 and of 40 blocks."""
    stop = {"min_tokens": 20, "stop": ["e", "a", "qu"]}
    bodies = [body | {"max_tokens": 60} for body in test_resume.bodies("") if "structured_outputs" not in body]
    bodies = [body | (stop if "stop" in body else {"min_tokens": 20}) for body in bodies]
    large = nodes.start_node("both", "--num-blocks-override", "2000")
    gateway = nodes.start_gateway()
    want = streamed(gateway.url, bodies)
    assert large.metric("kvferry:num_preemptions_total") == 0
    large.stop()
    small = nodes.start_node("both", "--num-blocks-override", "40")
    wait_known(gateway, small)
    assert [choices for choices, _ in streamed(gateway.url, bodies)] == [choices for choices, _ in want]
    assert small.metric("kvferry:num_preemptions_total") > 0
    wait_clean(small)


def test_who_has_priority_starts_before_those_who_came_earlier(nodes: Cluster) -> None:
    """One sequence at a time; two wait behind it, the urgent one came last."""
    node = nodes.start_node("both", "--scheduling-policy", "priority", "--max-num-seqs", "1")
    gateway, ended = nodes.start_gateway(), []

    async def one(client: httpx.AsyncClient, name: str, priority: int, max_tokens: int) -> None:
        await ask(client, gateway, new_prompt(20), priority=priority, max_tokens=max_tokens)
        ended.append(name)

    async def run() -> None:
        async with httpx.AsyncClient(timeout=120) as client:
            waits = asyncio.to_thread
            first = asyncio.create_task(one(client, "first", 0, 1900))
            await waits(wait_until, lambda: node.record().load.num_running == 1, 30, "the first runs")
            patient = asyncio.create_task(one(client, "patient", 3, 2))
            await waits(wait_until, lambda: node.record().load.num_waiting == 1, 30, "the second waits")
            urgent = asyncio.create_task(one(client, "urgent", -3, 2))
            await waits(wait_until, lambda: node.record().load.num_waiting == 2, 30, "the third waits")
            first.cancel()
            await asyncio.gather(patient, urgent)

    asyncio.run(run())
    assert ended == ["urgent", "patient"]


def test_cancels_that_race_with_the_end_of_their_requests_leave_the_engine_alive_and_clean(
    nodes: Cluster, lone: Lone
) -> None:
    """One token each, cancelled somewhere around the moment that it comes."""
    split = start(nodes)
    rng = random.Random(12)
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    plan = (split.prefill.candidate(),)
    requests = [
        GenerateRequest(f"r{i}", tuple(new_prompt(rng.choice((5, 60)))), params, prefill=plan) for i in range(500)
    ]

    async def one(client: DecodeClient, gate: asyncio.Semaphore, request: GenerateRequest) -> None:
        async with gate:
            await client.submit(request)
            await asyncio.sleep(rng.uniform(0, 0.03))
            await client.cancel(request.request_id)

    async def run() -> None:
        gate = asyncio.Semaphore(16)
        async with DecodeClient(split.decode) as client:
            await asyncio.gather(*(one(client, gate, request) for request in requests))
            last = await client.generate(GenerateRequest("last", tuple(new_prompt(60)), params, prefill=plan))
            assert last.finish_reason == "length"

    asyncio.run(run())
    ended = split.decode.metric("kvferry:request_success_total", finished_reason="length")
    cancelled = split.decode.metric("kvferry:request_success_total", finished_reason="abort")
    assert ended + cancelled == len(requests) + 1
    assert ended > 1, "every cancel came first: nothing raced"
    assert cancelled > 0, "every cancel came last: nothing raced"
    wait_clean(split.prefill, split.decode)
