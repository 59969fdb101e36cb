"""Each pod of an overlay as a process of its own: its rendered command and environment, asked by its rendered probes.

What stands for the cluster: pod addresses are loopback addresses, the Service `redis` is a real Redis, and the volume
of models is the user's own cache.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.common.cores import NODE_ENVIRON
from kvferry.services.rpc.aio import open_channel
from tests.e2e.cluster import Cluster, Process, cluster
from tests.k8s.manifests import Object, Pod, arguments, environ, of_kind

OVERLAY = "cpu-demo"
NUM_STREAMS, NUM_TOKENS = 6, 160


@dataclass
class Running:
    """One pod: its process, and what the manifest says of it."""

    pod: Pod
    template: Object
    process: Process
    started_s: float

    @property
    def container(self) -> Object:
        found: Object = self.template["spec"]["containers"][0]
        return found

    @property
    def grace_s(self) -> float:
        return float(self.template["spec"]["terminationGracePeriodSeconds"])

    async def passes(self, probe: str) -> bool:
        """Asks once, as the kubelet would."""
        spec = self.container[probe]
        timeout_s = spec.get("timeoutSeconds", 1)
        if "httpGet" in spec:
            ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
            url = f"http://{self.pod.ip}:{ports[spec['httpGet']['port']]}{spec['httpGet']['path']}"
            try:
                async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
                    return 200 <= (await client.get(url)).status_code < 400
            except httpx.HTTPError:
                return False
        async with open_channel(f"{self.pod.ip}:{spec['grpc']['port']}") as channel:
            request = health_pb2.HealthCheckRequest(service=spec["grpc"].get("service", ""))
            try:
                reply = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
            except Exception:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def becomes(self, probe: str) -> float:
        """Asks until it passes, as often as the manifest allows; the seconds since the process was started."""
        spec = self.container[probe]
        for _ in range(spec["failureThreshold"]):
            if await self.passes(probe):
                return time.monotonic() - self.started_s
            assert self.process.popen is not None
            assert self.process.popen.poll() is None, f"{self.pod.name} ended:\n{self.process.tail()}"
            await asyncio.sleep(spec["periodSeconds"])
        raise AssertionError(f"{probe} of {self.pod.name} did not pass in its window:\n{self.process.tail()}")


class Pods:
    def __init__(self, nodes: Cluster) -> None:
        self._nodes = nodes
        self._number = 0
        self.running: dict[str, list[Running]] = {}
        for name, found in of_kind(OVERLAY, "Deployment").items():
            if name != "redis":
                replicas = found["spec"]["replicas"]
                self.running[name] = [self._start(name, found["spec"]["template"]) for _ in range(replicas)]

    def all(self) -> list[Running]:
        return [pod for pods in self.running.values() for pod in pods]

    def _start(self, name: str, template: Object) -> Running:
        self._number += 1
        pod = Pod(f"{name}-{self._number}", f"127.77.0.{self._number}")
        (container,) = template["spec"]["containers"]
        variables = environ(OVERLAY, container, pod) | {"KVFERRY_CLUSTER__REDIS_URL": self._nodes.redis_url}
        for host in ("KVFERRY_NODE__NODE_HOST", "KVFERRY_GATEWAY__HOST"):
            if variables.get(host) == "0.0.0.0":
                variables[host] = pod.ip  # the pod's own network
        command = [sys.executable, "-m", "kvferry.services.local.cli", *arguments(container, variables)]
        log = self._nodes.folder / f"{pod.name}.log"
        process = Process(pod.name, command, log)
        with log.open("ab") as out:
            env = NODE_ENVIRON | os.environ | variables
            process.popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        self._nodes.processes.append(process)
        return Running(pod, template, process, time.monotonic())


@pytest.fixture(scope="module")
def running(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with cluster(tmp_path_factory.mktemp("pods"), str(smollm2)) as nodes:
        yield Pods(nodes)


async def _stream(url: str, number: int) -> tuple[str, str]:
    """Text and finish reason of one streamed completion."""
    body = {"model": "smollm2-135m", "prompt": f"{number}. Once upon a time there was", "max_tokens": NUM_TOKENS}
    body |= {"temperature": 0, "stream": True, "ignore_eos": True}
    text, reason = "", ""
    async with (
        httpx.AsyncClient(timeout=120, trust_env=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as reply,
    ):
        assert reply.status_code == 200, await reply.aread()
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"] or reason
    return text, reason


@pytest.mark.e2e
def test_probes_pass_in_their_windows_and_a_drain_loses_no_stream(running: Pods) -> None:
    asyncio.run(_probes(running))
    asyncio.run(_drains(running))


async def _probes(running: Pods) -> None:
    startup = await asyncio.gather(*(pod.becomes("startupProbe") for pod in running.all()))
    await asyncio.gather(*(pod.becomes("readinessProbe") for pod in running.all()))
    assert all(await asyncio.gather(*(pod.passes("livenessProbe") for pod in running.all())))
    print("startup after", ", ".join(f"{p.pod.name} {s:.1f} s" for p, s in zip(running.all(), startup, strict=True)))


async def _drains(running: Pods) -> None:
    """A decode node, then the gateway: each told to end with streams under way, each ends in time with status 0."""
    (gateway,) = running.running["gateway"]
    url = f"http://{gateway.pod.ip}:8000"
    undisturbed = await asyncio.gather(*(_stream(url, number) for number in range(NUM_STREAMS)))
    for victim in (running.running["decode"][0], gateway):
        streams = [asyncio.create_task(_stream(url, number)) for number in range(NUM_STREAMS)]
        await asyncio.sleep(1.0)
        assert not all(stream.done() for stream in streams), "nothing was under way: the streams were too short"
        ending = asyncio.create_task(asyncio.to_thread(victim.process.stop, timeout_s=victim.grace_s))
        assert await asyncio.gather(*streams) == undisturbed
        assert await ending == 0
        assert not await victim.passes("readinessProbe")
