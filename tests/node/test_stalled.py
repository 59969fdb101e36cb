"""A node that is alive and gets nothing done says so, and comes back by itself."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.common.nodes import NodeState
from kvferry.services.rpc.aio import LIVENESS
from tests.e2e.cluster import Node, cluster

DEADLINE_S = 60.0


def healthy(node: Node, service: str) -> bool:
    with grpc.insecure_channel(node.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def listens(node: Node) -> bool:
    try:
        healthy(node, LIVENESS)
    except grpc.RpcError:
        return False
    return True


def wait_until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline, f"never {what}"
        time.sleep(0.02)


def test_a_stalled_node_leaves_and_returns(tiny_model: Path, tmp_path: Path) -> None:
    with cluster(tmp_path, str(tiny_model)) as nodes:
        slow = ("--stall-timeout", "0.3", "--fail-points", "engine.step=delay:0.5:1500")
        node = nodes.start_node("both", *slow)
        for state, well in ((NodeState.STALLED, False), (NodeState.READY, True)):
            wait_until(lambda want=state: node.record().state is want, state)  # type: ignore[misc]
            wait_until(lambda want=well: healthy(node, "") is want, f"serving={well}")  # type: ignore[misc]
            wait_until(lambda want=well: healthy(node, LIVENESS) is want, f"alive={well}")  # type: ignore[misc]


def test_a_node_that_loads_or_has_no_redis_is_alive_and_not_serving(tiny_model: Path, tmp_path: Path) -> None:
    with cluster(tmp_path, str(tiny_model)) as nodes:
        nodes.processes.pop().stop()  # Redis: the second node cannot register, so it never becomes ready
        loads = nodes.start_node("both", "--fail-points", "node.load=delay@1:3600000", wait=False)
        alone = nodes.start_node("both", wait=False)
        wait_until(lambda: listens(loads), "listening")
        nodes.wait_node(alone)
        for node in (loads, alone):
            assert healthy(node, LIVENESS)
            assert not healthy(node, "")
        with pytest.raises(grpc.RpcError, match="loading"):
            loads.record()
        loads.stop(signal.SIGKILL)


def test_what_runs_on_a_stalled_node_goes_on_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    """Two of eight streams or so are on the first node when its engine hangs."""
    with cluster(tmp_path, str(tiny_model)) as nodes:
        hangs = ("--stall-timeout", "1", "--fail-points", "engine.step=delay@60:40000", "--drain-s", "0")
        nodes.start_node("both", *hangs, wait=False)
        nodes.wait_node(nodes.start_node("both", wait=False))
        gateway = nodes.start_gateway()
        wait_until(lambda: len(gateway.get("/cluster")["nodes"]) == 2, "both known")
        bodies = [
            {"model": "test", "prompt": [7 + number] * 40, "max_tokens": 150, "temperature": 1, "seed": number}
            | {"ignore_eos": True}
            for number in range(8)
        ]
        texts = asyncio.run(_ask_all(gateway.url, bodies))
        assert gateway.metric("kvferry:request_resumes_total", reason="node_lost") > 0
        assert texts == asyncio.run(_ask_all(gateway.url, bodies))


async def _ask_all(url: str, bodies: list[dict[str, Any]]) -> list[str]:
    async with httpx.AsyncClient(timeout=120) as client:
        replies = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for body in bodies))
    assert [reply.status_code for reply in replies] == [200] * len(bodies), [reply.text for reply in replies]
    return [str(reply.json()["choices"][0]["text"]) for reply in replies]
