"""Decode nodes that are killed, frozen or shut down under running streams: what clients read is what they would have.

Every comparison is of whole streams: text, log-probabilities, ends and usage, bit for bit.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cluster import Cluster, Gateway, Node, cluster
from tests.e2e.streams import Stream, ask, running

LONG = {"max_tokens": 500, "ignore_eos": True}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 90, "maxItems": 90}
NUM_EVENTS = 12  # of each stream before anything happens


def _ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=count)


def bodies(salt: str) -> list[dict[str, Any]]:
    """One stream of each kind. Another salt: nothing is in a cache, so usage is the same in each run."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 2, **LONG},
        {"temperature": 1, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 0, **LONG},
        {"temperature": 0.9, "seed": 5, "top_p": 0.9, "echo": True, "logprobs": 1, **LONG},
        {"temperature": 1, "seed": 11, "n": 3, "logprobs": 1, **LONG},
        {"temperature": 1, "seed": 13, "structured_outputs": {"json": NUMBERS}, "max_tokens": 900, "n": 2},
        {"temperature": 1, "seed": 17, "min_tokens": 300, "stop": ["e", "a", "qu"], "max_tokens": 500},
        {"temperature": 1, "seed": 19, "bad_words": ["the"], "stop_token_ids": _ids(1, 9), "min_tokens": 300, **LONG},
    ]
    return [{"prompt": _ids(40 + i, 90 + 7 * i), "cache_salt": salt, **kind} for i, kind in enumerate(kinds)]


class Fixture:
    """1 prefill node, decode nodes as asked for, and a gateway, with the tiny model."""

    def __init__(self, nodes: Cluster, num_decode: int, *flags: str, prefill_flags: tuple[str, ...] = ()) -> None:
        self.nodes = nodes
        self.flags = ("--local-prefill-max-tokens", "16", *flags)
        self.prefill = nodes.start_node("prefill", *prefill_flags, wait=False)
        self.decode = [self.start_decode(f"d{i}", wait=False) for i in range(num_decode)]
        for node in (self.prefill, *self.decode):
            nodes.wait_node(node)
        self.gateway: Gateway = nodes.start_gateway()

    def start_decode(self, name: str, wait: bool = True) -> Node:
        return self.nodes.start_node("decode", "--node-id", name, *self.flags, wait=wait)

    def resumes(self, reason: str) -> int:
        return int(self.gateway.metric("kvferry:request_resumes_total", reason=reason))

    def check_settled(self, *nodes: Node) -> None:
        for node in nodes:
            deadline = time.monotonic() + 15
            while (load := node.record().load).accounts.available != load.num_blocks or load.num_waiting:
                assert time.monotonic() < deadline, f"{node.name} did not come to rest: {load}"
                time.sleep(0.05)


@pytest.fixture
def two(tiny_model: Path, tmp_path: Path) -> Iterator[Fixture]:
    with cluster(tmp_path, str(tiny_model)) as nodes:
        yield Fixture(nodes, 2)


def busier(decode: list[Node], streams: list[Stream]) -> tuple[Node, Node, int]:
    """Of the nodes d0 and d1 the one with more of the streams, the other one, and how many: they may all be on one."""
    num = Counter(
        dict(part.split("=") for part in stream.route.split())["decode"] for stream in streams if not stream.done
    )
    assert num, "too short: this tests nothing"
    order = sorted((0, 1), key=lambda i: -num[f"d{i}"])
    return decode[order[0]], decode[order[1]], num[f"d{order[0]}"]


def check(streams: list[Stream], want: list[tuple[Any, ...]]) -> None:
    for stream, right in zip(streams, want, strict=True):
        assert stream.told == right, {k: v for k, v in stream.body.items() if k != "prompt"}


def test_streams_of_every_kind_go_on_when_the_only_decode_node_is_replaced(tiny_model: Path, tmp_path: Path) -> None:
    with cluster(tmp_path, str(tiny_model)) as nodes:
        fixture = Fixture(nodes, 1)
        want = ask(fixture.gateway.url, bodies("before"))
        (old,) = fixture.decode

        async def run() -> list[Stream]:
            async with running(fixture.gateway.url, bodies("now")) as streams:
                await streams.begun(NUM_EVENTS)
                old.send(signal.SIGKILL)
                done = [(stream.usage, stream.choices.keys()) for stream in streams.all if stream.done]
                assert not done, "too short: this tests nothing"
                fixture.decode = [await asyncio.to_thread(fixture.start_decode, "d0")]
            return streams.all

        check(asyncio.run(run()), want)
        assert fixture.resumes("node_lost") == len(want)
        old.stop(signal.SIGKILL)
        fixture.check_settled(fixture.prefill, *fixture.decode)
        assert fixture.gateway.metric("kvferry:num_requests_running") == 0


def test_streams_of_a_killed_node_go_on_at_the_other_one(two: Fixture) -> None:
    want = ask(two.gateway.url, bodies("before"))

    async def run() -> tuple[list[Stream], Node, Node, int]:
        async with running(two.gateway.url, [*bodies("now"), *bodies("too")]) as streams:
            await streams.begun(NUM_EVENTS)
            killed, other, lost = busier(two.decode, streams.all)
            killed.send(signal.SIGKILL)
        return streams.all, killed, other, lost

    streams, killed, other, lost = asyncio.run(run())
    check(streams, want * 2)
    assert two.resumes("node_lost") == lost
    assert two.gateway.metric("kvferry:request_errors_total") == 0
    killed.stop(signal.SIGKILL)
    two.check_settled(two.prefill, other)


def test_streams_of_a_frozen_node_go_on_elsewhere_and_it_is_fenced_when_it_wakes(two: Fixture) -> None:
    want = ask(two.gateway.url, bodies("before"))

    async def run() -> tuple[list[Stream], Node]:
        async with running(two.gateway.url, [*bodies("now"), *bodies("too")]) as streams:
            await streams.begun(NUM_EVENTS)
            frozen, _, lost = busier(two.decode, streams.all)
            frozen.send(signal.SIGSTOP)
            try:
                async with asyncio.timeout(30):  # a ping without an answer, not the minute that gRPC gives some
                    while two.resumes("node_lost") < lost:
                        assert not all(stream.done for stream in streams.all), "streams have ended that a dead node ran"
                        await asyncio.sleep(0.1)
            finally:
                frozen.send(signal.SIGCONT)
        return streams.all, frozen

    streams, frozen = asyncio.run(run())
    check(streams, want * 2)
    two.check_settled(two.prefill, *two.decode)
    assert frozen.metric("kvferry:request_success_total", finished_reason="abort") > 0
    assert ask(two.gateway.url, bodies("after")) == want, "the cluster is not what it was"


def test_a_drain_lets_streams_finish_within_the_grace_period_and_takes_no_new_ones(two: Fixture) -> None:
    want = ask(two.gateway.url, bodies("before"))

    async def run() -> tuple[list[Stream], Node, Node]:
        async with running(two.gateway.url, [*bodies("now"), *bodies("too")]) as streams:
            await streams.begun(NUM_EVENTS)
            drained, other, _ = busier(two.decode, streams.all)
            drained.send(signal.SIGTERM)
            later = await asyncio.to_thread(ask, two.gateway.url, bodies("later"))
            assert later == want
        return streams.all, drained, other

    streams, drained, other = asyncio.run(run())
    check(streams, want * 2)
    assert drained.stop() == 0
    assert two.resumes("draining") == two.resumes("node_lost") == 0
    two.check_settled(two.prefill, other)


def test_what_is_left_at_the_end_of_the_grace_period_moves_to_the_other_node(tiny_model: Path, tmp_path: Path) -> None:
    with cluster(tmp_path, str(tiny_model)) as nodes:
        fixture = Fixture(nodes, 2, "--drain-s", "0.05")
        want = ask(fixture.gateway.url, bodies("before"))

        async def run() -> tuple[list[Stream], Node, Node]:
            async with running(fixture.gateway.url, [*bodies("now"), *bodies("too")]) as streams:
                await streams.begun(NUM_EVENTS)
                drained, other, _ = busier(fixture.decode, streams.all)
                drained.send(signal.SIGTERM)
            return streams.all, drained, other

        streams, drained, other = asyncio.run(run())
        check(streams, want * 2)
        assert fixture.resumes("draining") > 0
        assert fixture.resumes("node_lost") == 0, "it did not say why"
        assert drained.stop() == 0
        fixture.check_settled(fixture.prefill, other)


def test_a_draining_prefill_node_is_read_to_the_end(tiny_model: Path, tmp_path: Path) -> None:
    """Its blocks are computed and fetched during the drain; no prompt is computed anywhere else."""
    prompts = [{"prompt": _ids(i, 1900), "max_tokens": 4, "temperature": 0} for i in range(3)]
    with cluster(tmp_path, str(tiny_model)) as nodes:
        slow, slower = (("--fail-points", f"engine.step=delay:1:{ms}") for ms in (100, 300))
        one = Fixture(nodes, 1, *slower, prefill_flags=slow)  # which leaves no doubt where to compute

        def num_prompts() -> int:
            load = one.prefill.record().load
            return load.num_running + load.num_waiting

        want = [told for body in prompts for told in ask(one.gateway.url, [body | {"cache_salt": "before"}])]

        async def run() -> list[Stream]:
            async with running(one.gateway.url, prompts) as streams:
                while num_prompts() < len(prompts):
                    assert not streams.all[0].done, "it was over before the last prompt had come"
                    await asyncio.sleep(0.01)
                one.prefill.send(signal.SIGTERM)
            return streams.all

        check(asyncio.run(run()), want)
        assert one.prefill.stop() == 0
        assert one.decode[0].metric("kvferry:prefill_fallback_total") == 0
        one.check_settled(*one.decode)


def test_smollm2_goes_on_after_a_kill(smollm2: Path, tmp_path: Path) -> None:
    questions = ["Name three ferries and where they go.", "Write a short story about a harbour."]
    chats = [
        {"messages": [{"role": "user", "content": text}], "max_tokens": 60, "logprobs": True, "ignore_eos": True}
        | {"temperature": temperature, "seed": 7, "top_logprobs": 2}
        for text in questions
        for temperature in (0, 1)
    ]

    def salted(salt: str) -> list[dict[str, Any]]:
        """No prompt finds the beginning of another in a cache."""
        return [chat | {"cache_salt": f"{salt} {i}"} for i, chat in enumerate(chats)]

    with cluster(tmp_path, str(smollm2)) as nodes:
        decode = [nodes.start_node("decode", "--node-id", f"d{i}", wait=False) for i in range(2)]
        for node in decode:
            nodes.wait_node(node)
        gateway = nodes.start_gateway()
        want = ask(gateway.url, salted("before"))

        async def run() -> tuple[list[Stream], Node]:
            async with running(gateway.url, salted("now")) as streams:
                await streams.begun(15)
                killed, _, _ = busier(decode, streams.all)
                killed.send(signal.SIGKILL)
            return streams.all, killed

        streams, killed = asyncio.run(run())
        check(streams, want)
        assert gateway.metric("kvferry:request_resumes_total", reason="node_lost") > 0
        killed.stop(signal.SIGKILL)
