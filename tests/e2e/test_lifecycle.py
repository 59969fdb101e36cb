"""What happens around requests in a running cluster: clients that leave, nodes that die, requests that are wrong.

After each test every block is free or cached on every node, no lease is open, and the next request works.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Cluster, Gateway, Node, cluster
from tests.e2e.reference import wait_known, wait_until

SETTLE_S = 10.0


class Fixture:
    """1 prefill + 1 decode + gateway with the tiny model; everything long is prefilled remotely."""

    def __init__(self, nodes: Cluster) -> None:
        self.nodes = nodes
        self.prefill = nodes.start_node("prefill", wait=False)
        self.decode = nodes.start_node("decode", "--local-prefill-max-tokens", "16", wait=False)
        nodes.wait_node(self.prefill)
        nodes.wait_node(self.decode)
        self.gateway: Gateway = nodes.start_gateway()

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        content = body if isinstance(body, bytes | str) else json.dumps(body)
        headers = {"content-type": "application/json"}
        return httpx.post(self.gateway.url + path, content=content, headers=headers, timeout=60, **kwargs)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        body = {"model": "test", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        return self.post("/v1/completions", body | fields)

    def text(self, prompt: Any, **fields: Any) -> str:
        reply = self.complete(prompt, **fields)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["text"])

    def check_settled(self, *nodes: Node) -> None:
        """Nothing is owned by anybody on these nodes, soon."""
        for node in nodes or (self.prefill, self.decode):
            deadline = time.monotonic() + SETTLE_S
            while True:
                load = node.record().load
                idle = load.accounts.available == load.accounts.total == load.num_blocks
                if idle and load.num_leases == load.num_running == load.num_waiting == 0:
                    break
                assert time.monotonic() < deadline, f"{node.name} did not come to rest: {load}"
                time.sleep(0.05)


@pytest.fixture(scope="module")
def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    """For tests that leave the cluster as they found it."""
    with cluster(tmp_path_factory.mktemp("lifecycle"), str(tiny_model)) as nodes:
        yield Fixture(nodes)


@pytest.fixture
def own(tiny_model: Path, tmp_path: Path) -> Iterator[Fixture]:
    """For tests that kill something."""
    with cluster(tmp_path, str(tiny_model)) as nodes:
        yield Fixture(nodes)


def _ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 500), k=count)


async def _stream(url: str, prompt: list[int], leave_after_s: float | None, **fields: Any) -> list[dict[str, Any]]:
    """Events of one stream; with `leave_after_s` the client hangs up then."""
    body = {"model": "test", "prompt": prompt, "max_tokens": 300, "stream": True, "ignore_eos": True} | fields
    events: list[dict[str, Any]] = []

    async def read() -> None:
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("POST", f"{url}/v1/completions", json=body) as reply,
        ):
            assert reply.status_code == 200, await reply.aread()
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line[6:]))

    if leave_after_s is None:
        await read()
    else:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(read(), leave_after_s)
    return events


def test_fifty_streams_of_which_half_are_abandoned_leave_nothing_behind(shared: Fixture) -> None:
    rng = random.Random(5)

    async def run() -> list[list[dict[str, Any]]]:
        return await asyncio.gather(
            *(
                _stream(shared.gateway.url, _ids(i, rng.randrange(10, 400)), rng.uniform(0, 2.0) if i % 2 else None)
                for i in range(50)
            )
        )

    streams = asyncio.run(run())
    for events in streams[::2]:
        assert [c["finish_reason"] for e in events for c in e["choices"] if c["finish_reason"]] == ["length"]
    shared.check_settled()
    deadline = time.monotonic() + SETTLE_S
    while shared.gateway.metric("kvferry:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert shared.gateway.metric("kvferry:num_requests_running") == 0
    assert shared.prefill.metric("kvferry:leases_open") == 0


def test_second_request_with_the_same_prefix_computes_only_the_rest(shared: Fixture) -> None:
    prefix = _ids(77, 500)
    first = shared.complete([*prefix, *_ids(1, 20)]).json()["usage"]
    computed = _computed(shared)
    second = shared.complete([*prefix, *_ids(2, 20)]).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < 32
    assert second["prompt_tokens_details"]["cached_tokens"] >= 480
    assert _computed(shared) - computed == 520 - second["prompt_tokens_details"]["cached_tokens"]


def _computed(fixture: Fixture) -> float:
    nodes = (fixture.prefill, fixture.decode)
    return sum(n.metric("kvferry:prompt_tokens_by_source_total", source="local_compute") for n in nodes)


def _num_first_tokens(fixture: Fixture) -> float:
    return fixture.gateway.metric("kvferry:time_to_first_token_seconds_count")


def test_sigkilled_decode_node_ends_its_streams_with_an_error_and_its_successor_serves(own: Fixture) -> None:
    """Where nobody takes them over within the bound: `test_resume.py` has all other cases."""
    own.gateway = own.nodes.start_gateway("--resume-timeout", "1")
    want = own.text(_ids(1, 200))

    async def run() -> list[list[dict[str, Any]]]:
        async with asyncio.TaskGroup() as tasks:
            # so many tokens that none can be finished when the node dies
            running = [
                tasks.create_task(_stream(own.gateway.url, _ids(i, 100), None, max_tokens=1500)) for i in range(4)
            ]
            await asyncio.to_thread(wait_until, lambda: _num_first_tokens(own) == 1 + 4, 30, "all have begun")
            own.decode.send(signal.SIGKILL)
        return [task.result() for task in running]

    for events in asyncio.run(run()):
        assert "error" in events[-1], events[-1]
        assert sum("error" in event for event in events) == 1
    own.decode.stop(signal.SIGKILL)
    own.check_settled(own.prefill)
    old = own.decode
    own.decode = own.nodes.start_node("decode", "--local-prefill-max-tokens", "16", port=old.port)
    own.gateway.wait_ready()
    _until_ok(own, _ids(1, 200))
    assert own.text(_ids(1, 200)) == want
    own.check_settled()


def test_prefill_node_killed_and_restarted_behind_its_address(own: Fixture) -> None:
    want = own.text(_ids(1, 800))
    port = own.prefill.port
    own.prefill.stop(signal.SIGKILL)
    assert own.text(_ids(2, 800)), "the decode node did not compute the prompt itself"
    assert own.text(_ids(1, 800), cache_salt="x") == want, "other text without a prefill node"
    own.check_settled(own.decode)
    own.prefill = own.nodes.start_node("prefill", port=port)
    wait_known(own.gateway, own.prefill)
    before = own.decode.metric("kvferry:transfer_blocks_total")
    assert own.text(_ids(1, 800), cache_salt="y") == want
    assert own.decode.metric("kvferry:transfer_blocks_total") > before, "the new prefill node is not used"
    own.check_settled()


def test_prefill_node_killed_while_it_computes(own: Fixture) -> None:
    prompts = [_ids(i, 1800) for i in range(6)]
    want = [own.text(p, cache_salt="before") for p in prompts]

    async def run() -> list[list[dict[str, Any]]]:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(_stream(own.gateway.url, p, None, max_tokens=8, temperature=0)) for p in prompts
            ]
            await asyncio.to_thread(wait_until, lambda: own.prefill.record().load.num_running > 0, 30, "it computes")
            own.prefill.send(signal.SIGKILL)
        return [task.result() for task in running]

    for events, text in zip(asyncio.run(run()), want, strict=True):
        assert "".join(c["text"] for e in events for c in e["choices"]) == text
    own.prefill.stop(signal.SIGKILL)
    own.check_settled(own.decode)


def test_stopped_redis_does_not_stop_requests(own: Fixture) -> None:
    want = own.text(_ids(1, 200))
    redis = own.nodes.processes[0]
    redis.send(signal.SIGSTOP)
    try:
        for _ in range(3):
            assert own.text(_ids(1, 200)) == want
        time.sleep(6.0)  # longer than the nodes' records live
        assert own.text(_ids(1, 200)) == want
    finally:
        redis.send(signal.SIGCONT)
    wait_until(lambda: own.gateway.metric("kvferry:index_up") == 1, 30, "the gateway asks Redis again")
    assert own.text(_ids(1, 200)) == want
    own.check_settled()


def _until_ok(fixture: Fixture, prompt: list[int]) -> None:
    deadline = time.monotonic() + 20
    while fixture.complete(prompt).status_code != 200:
        assert time.monotonic() < deadline, "the cluster did not recover"
        time.sleep(0.2)


CHAT = {"model": "test", "messages": [{"role": "user", "content": "hi"}]}
BAD = {
    "prompt longer than the context": ("/v1/completions", {"model": "test", "prompt": [5] * 3000}, 400, "2048"),
    "unknown model": ("/v1/completions", {"model": "nope", "prompt": "x"}, 404, "nope"),
    "malformed JSON": ("/v1/completions", '{"model": "test", ', 400, "JSON"),
    "wrong type": ("/v1/completions", {"model": "test", "prompt": "x", "max_tokens": "ten"}, 400, "max_tokens"),
    "empty prompt": ("/v1/completions", {"model": "test", "prompt": []}, 400, "prompt"),
    "token id out of range": ("/v1/completions", {"model": "test", "prompt": [5, 99999]}, 400, "99999"),
    "negative token id": ("/v1/completions", {"model": "test", "prompt": [5, -1]}, 400, "-1"),
    "empty messages": ("/v1/chat/completions", {"model": "test", "messages": []}, 400, "messages"),
    "unknown role": ("/v1/chat/completions", CHAT | {"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
    "unknown path": ("/v1/nothing", {}, 404, "/v1/nothing"),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_an_error_that_names_it(shared: Fixture, name: str, stream: bool) -> None:
    path, body, status, names = BAD[name]
    if stream and isinstance(body, dict):
        body = {**body, "stream": True}
    reply = shared.post(path, body)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert names in error["message"], error
    assert shared.text(_ids(3, 40))
    shared.check_settled()


def test_prompt_that_could_never_fit_the_pool_is_refused_with_the_numbers(tiny_model: Path, tmp_path: Path) -> None:
    with cluster(tmp_path, str(tiny_model)) as nodes:
        nodes.start_node("both", "--num-blocks-override", "8")
        gateway = nodes.start_gateway()
        body = {"model": "test", "prompt": [5] * 200, "max_tokens": 4}
        reply = httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=30)
        assert reply.status_code == 400
        assert "128" in reply.json()["error"]["message"], reply.text
        body["prompt"] = [5] * 100
        assert httpx.post(f"{gateway.url}/v1/completions", json=body, timeout=30).status_code == 200
