"""Every way a hand-over can break, with real processes: the client has the right text or one clear error, and
afterwards no block has an owner on any node. `docs/failures.md` lists the edges with their bounds.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.common.requests import GenerateRequest, SamplingParams
from kvferry.services.rpc.probe import problem
from tests.e2e.cluster import Answer, Cluster, DecodeClient, Gateway, Node, cluster
from tests.e2e.reference import Lone, ask, new_prompt, num_received, post, wait_clean, wait_known, wait_until, wait_used
from tests.tiny_model import TinyShape, write_tiny_model

LENGTH = 700
NUM_BLOCKS = (LENGTH - 1) // 16
MANY_TOKENS = 256
"""A message takes along all tokens that are there: so many need more than three."""
RESUMED_S = 30.0
"""A request whose decode node was lost waits for another one for so long."""
DECODE = ("--local-prefill-max-tokens", "16")


@pytest.fixture
def nodes(tiny_model: Path, tmp_path: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, str(tiny_model)) as made:
        yield made


def start(nodes: Cluster, prefill: tuple[str, ...] = (), decode: tuple[str, ...] = ()) -> tuple[Node, Node, Gateway]:
    nodes.start_node("prefill", *prefill, wait=False)
    nodes.start_node("decode", *DECODE, *decode, wait=False)
    started = [process for process in nodes.processes if isinstance(process, Node)]
    for node in started:
        nodes.wait_node(node)
    return started[0], started[1], nodes.start_gateway()


def wait_killed(node: Node, bound_s: float = 10.0) -> None:
    """By its fail point."""
    assert node.popen is not None
    popen = node.popen
    wait_until(lambda: popen.poll() is not None, bound_s, f"{node.name} dies")
    assert popen.returncode == -signal.SIGKILL, node.tail()


@pytest.mark.parametrize(
    ("transports", "point"),
    [
        pytest.param("shm,grpc", "rpc.prefill.reply=kill@1", id="before anything is offered"),
        pytest.param("shm,grpc", "rpc.prefill.reply=kill@3", id="while blocks are offered"),
        pytest.param("grpc", "transfer.grpc.chunk=kill@1", id="while bytes are on their way"),
        pytest.param("shm,grpc", "transfer.lease.released=kill@1", id="after all is copied"),
    ],
)
def test_a_prefill_node_that_dies_costs_time_only_and_its_successor_is_used(
    nodes: Cluster, lone: Lone, transports: str, point: str
) -> None:
    allowed = ("--transports", transports)
    prefill, decode, gateway = start(nodes, (*allowed, "--fail-points", point), allowed)
    prompt = new_prompt(LENGTH)
    assert ask(gateway, prompt) == lone(prompt)
    wait_killed(prefill)
    assert decode.metric("kvferry:prefill_fallback_total", cause="all_candidates_failed") == 1
    wait_clean(decode)
    nodes.processes.remove(prefill)
    successor = nodes.start_node("prefill", *allowed, port=prefill.port)
    wait_known(gateway, successor)
    wait_used(gateway, decode, lone, LENGTH)
    wait_clean(successor, decode)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("rpc.prefill.start=kill@1", id="before it pulls"),
        pytest.param("transfer.shm.copy=kill@1", id="while it pulls"),
        pytest.param("transfer.lease.release=kill@1", id="after it has copied"),
        pytest.param("rpc.decode.outputs=kill@3", id="after the first tokens"),
    ],
)
def test_a_decode_node_that_dies_is_followed_by_its_successor_and_the_prefill_node_is_clean(
    nodes: Cluster, lone: Lone, point: str
) -> None:
    prefill, decode, gateway = start(nodes, decode=("--fail-points", point))
    prompt = new_prompt(LENGTH)
    want = lone(prompt, max_tokens=MANY_TOKENS)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, gateway, prompt, max_tokens=MANY_TOKENS)
        wait_killed(decode, 30.0)
        wait_clean(prefill)
        nodes.processes.remove(decode)
        successor = nodes.start_node("decode", *DECODE, port=decode.port)
        assert answer.result() == want
    wait_clean(prefill, successor)


def test_a_request_whose_decode_node_dies_and_is_not_followed_ends_in_one_clear_error(nodes: Cluster) -> None:
    """Within `--resume-timeout`, which is short here."""
    nodes.start_node("prefill", wait=False)
    decode = nodes.start_node("decode", *DECODE, "--fail-points", "rpc.decode.outputs=kill@3")
    gateway = nodes.start_gateway("--resume-timeout", "1")
    reply = post(gateway, new_prompt(LENGTH), timeout_s=60, max_tokens=MANY_TOKENS)
    wait_killed(decode)
    assert reply.status_code == 503
    error = reply.json()["error"]
    assert error["code"] == "unavailable"
    assert decode.address in error["message"] or f"decode-{decode.port}" in error["message"], error
    nodes.processes.remove(decode)
    (prefill,) = [process for process in nodes.processes if isinstance(process, Node)]
    wait_clean(prefill)


def forced(decode: Node, prefill: Node, prompt: list[int]) -> Answer:
    """With a plan that no router would make."""
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
    request = GenerateRequest("forced", tuple(prompt), params, prefill=(prefill.candidate(),))

    async def run() -> Answer:
        async with DecodeClient(decode) as client:
            return await client.generate(request)

    return asyncio.run(run())


@pytest.mark.parametrize("other", ["block size", "KV dtype", "model"])
def test_a_prefill_node_of_another_model_or_layout_is_not_used_even_when_it_is_asked(
    nodes: Cluster, lone: Lone, tmp_path: Path, other: str
) -> None:
    twin = write_tiny_model(tmp_path / "twin", shape=TinyShape(max_position_embeddings=2048), seed=1)
    flags, model, differs = {
        "block size": (("--block-size", "32"), "", "has block_size 32, this node has 16"),
        "KV dtype": (
            ("--kv-cache-dtype", "float16"),
            "",
            "has kv_cache_dtype 'float16', this node has 'float32'",
        ),
        "model": ((), str(twin), "has model_fingerprint "),
    }[other]
    prefill = nodes.start_node("prefill", *flags, model=model, wait=False)
    decode = nodes.start_node("decode", *DECODE)
    nodes.wait_node(prefill)
    gateway = nodes.start_gateway()
    wait_known(gateway, prefill)
    prompt, second = new_prompt(LENGTH), new_prompt(LENGTH)
    reply = post(gateway, prompt)
    assert "prefill=none" in reply.headers["x-kvferry-route"]
    assert reply.json()["choices"][0]["text"] == lone(prompt).text
    assert decode.metric("kvferry:prefill_fallback_total", cause="no_candidate") == 1
    alerts = [alert for alert in gateway.get("/cluster/live")["alerts"] if differs in alert["detail"]]
    assert [alert["level"] for alert in alerts] == ["warning"]
    assert differs in gateway.tail()
    got, want = forced(decode, prefill, second), lone(second)
    assert tuple(got.logprobs) == want.logprobs
    assert decode.metric("kvferry:transfer_failures_total", cause="layout_mismatch") == 1
    assert differs.split()[1] in decode.tail(), "the handshake did not say what differs"
    assert num_received(decode) == 0
    wait_clean(prefill, decode)


def test_a_prompt_that_only_the_prefill_node_refuses_is_the_clients_error_and_no_token_is_drawn(
    nodes: Cluster, lone: Lone
) -> None:
    prefill, decode, gateway = start(nodes, ("--num-blocks-override", "32"))
    wait_known(gateway, prefill)
    reply = post(gateway, new_prompt(LENGTH))
    assert reply.status_code == 400
    assert "512" in reply.json()["error"]["message"], reply.text
    got = forced(decode, prefill, new_prompt(LENGTH))
    assert (got.finish_reason, got.error, got.token_ids) == ("error", "context_length_exceeded", [])
    wait_clean(prefill, decode)
    prompt = new_prompt(300)
    assert ask(gateway, prompt) == lone(prompt)


def test_a_lease_that_expires_while_its_blocks_are_copied_is_not_confirmed(nodes: Cluster, lone: Lone) -> None:
    """No renewal arrives, and the copy takes longer than the lease lives."""
    faults = "transfer.lease.renew=drop:1,transfer.shm.copy=delay:1:2500"
    prefill, decode, gateway = start(nodes, ("--lease-s", "1"), ("--fail-points", faults))
    prompt = new_prompt(LENGTH)
    assert ask(gateway, prompt) == lone(prompt)
    assert prefill.metric("kvferry:leases_expired_total") >= 1
    assert decode.metric("kvferry:transfer_failures_total", cause="lease_expired") == 1
    assert decode.metric("kvferry:prefill_fallback_total") == 1
    assert decode.metric("kvferry:transfer_failures_total") == 1
    wait_clean(prefill, decode)


def test_a_redis_that_is_killed_and_comes_back_empty_stops_nobody_and_knows_all_again(
    nodes: Cluster, lone: Lone
) -> None:
    prefill, decode, gateway = start(nodes)
    wait_known(gateway, prefill)
    held = new_prompt(LENGTH)
    assert ask(gateway, held) == lone(held)
    redis = nodes.processes.pop(0)
    redis.stop(signal.SIGKILL)
    wait_until(lambda: not gateway.get("/cluster")["index"]["ok"], 10.0, "the gateway misses Redis")
    for _ in range(3):
        prompt, before = new_prompt(LENGTH), num_received(decode)
        assert ask(gateway, prompt) == lone(prompt)
        assert num_received(decode) == before + NUM_BLOCKS, "the prefill node was forgotten"
    nodes.processes.insert(0, nodes.start_redis())
    del nodes.processes[-1]
    wait_until(lambda: bool(gateway.get("/cluster")["index"]["ok"]), 10.0, "Redis is back")

    def is_matched() -> bool:
        reply = post(gateway, held)
        assert reply.json()["choices"][0]["text"] == lone(held).text
        return f"matched={NUM_BLOCKS}" in reply.headers["x-kvferry-route"]

    wait_until(is_matched, 30.0, "Redis knows again who holds what")
    wait_clean(prefill, decode)


def test_workers_that_start_before_redis_register_when_it_comes(tiny_model: Path, tmp_path: Path, lone: Lone) -> None:
    nodes = Cluster(tmp_path, str(tiny_model))
    try:
        prefill = nodes.start_node("prefill", wait=False)
        decode = nodes.start_node("decode", *DECODE)
        nodes.wait_node(prefill)
        instances = {node.record().instance_id for node in (prefill, decode)}
        wait_until(lambda: "cannot register" in decode.tail(), 10.0, "the decode node misses Redis")
        assert not any(is_serving(node) for node in (prefill, decode)), "ready before it is registered"
        nodes.start_redis()
        for node in (prefill, decode):
            wait_until(lambda node=node: is_serving(node), 10.0, f"{node.name} is ready")
        gateway = nodes.start_gateway()
        wait_known(gateway, prefill)
        prompt = new_prompt(LENGTH)
        assert ask(gateway, prompt) == lone(prompt)
        assert num_received(decode) == NUM_BLOCKS
        assert {node.record().instance_id for node in (prefill, decode)} == instances, "a node was restarted"
    finally:
        nodes.stop()


def is_serving(node: Node) -> bool:
    return problem(f"grpc://{node.address}") is None
