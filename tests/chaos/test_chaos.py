"""A cluster under seeded random faults: every answer is the fault-free one, and afterwards nothing is owned by anybody.

What goes wrong is said by the fail points of `common/fail_points.py`; a prefill and a decode node are also killed, and
restarted behind their addresses. `KVFERRY_CHAOS_SEED` picks another run.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.common.fail_points import POINTS
from kvferry.common.hashing import block_names, root_name
from kvferry.services.index.redis import RedisIndex
from kvferry.services.transfer.conformance.owners import HAS_UCX
from tests.chaos.redis_troubles import Answers, trouble
from tests.e2e.cluster import Cluster, Gateway, Node, cluster
from tests.e2e.reference import RETURNED_S, wait_known

SEED = int(os.environ.get("KVFERRY_CHAOS_SEED", "1"))
NUM_REQUESTS, AT_ONCE = 150, 5
SETTLE_S = 10.0
FAST = ("--lease-s", "3", "--lease-renew-s", "0.25", "--peer-timeout-s", "1.2")
"""A lost message costs one silence of a peer: shorter than in life, so that many can be lost in a minute."""

RULES = (
    "transfer.grpc.chunk=corrupt@3,transfer.grpc.chunk=corrupt@8,"
    "transfer.grpc.chunk=corrupt:0.1,transfer.grpc.chunk=drop:0.04,transfer.grpc.chunk=duplicate:0.04,"
    "transfer.grpc.chunk=delay:0.1:30,transfer.shm.copy=delay:0.3:40,"
    "transfer.ucx.run=corrupt:0.05,transfer.ucx.run=drop:0.03,transfer.ucx.run=duplicate:0.03,"
    "transfer.ucx.run=delay:0.1:30,"
    "transfer.lease.renew=drop:0.3,transfer.lease.renew=delay:0.1:400,transfer.lease.renew=duplicate:0.1,"
    "transfer.lease.release=drop:0.05,transfer.lease.release=duplicate:0.1,transfer.lease.released=drop:0.05,"
    "rpc.prefill.start=drop:0.03,rpc.prefill.start=duplicate:0.05,"
    "rpc.prefill.reply=drop:0.02,rpc.prefill.reply=duplicate:0.03,rpc.prefill.reply=delay:0.1:50,"
    "rpc.prefill.reply=corrupt:0.02,rpc.decode.outputs=delay:0.05:20,"
    "rpc.session.submit=delay:0.1:50,rpc.session.cancel=drop:0.3,rpc.session.cancel=duplicate:0.3,"
    "index.publish=drop:0.2,index.publish=delay:0.2:50,index.publish=duplicate:0.2,"
    "index.lookup=drop:0.2,index.lookup=delay:0.2:30,index.lookup=corrupt:0.3"
)


@dataclass
class Summary:
    num_requests: int = 0
    num_abandoned: int = 0
    num_wrong: int = 0
    num_errors: int = 0
    restarts: Counter[str] = field(default_factory=Counter)
    num_resumed: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    num_corrupt_blocks_caught: int = 0
    num_received: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        killed = " and ".join(f"a {role} node {count} times" for role, count in sorted(self.restarts.items()))
        kinds = ", ".join(f"{count} x {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"{self.num_requests} requests ({self.num_abandoned} abandoned) in {self.seconds:.0f} s, wrong answers = "
            f"{self.num_wrong}, errors = {self.num_errors}; blocks received {self.num_received}, hand-overs ended by a "
            f"corrupt block {self.num_corrupt_blocks_caught}; killed: {killed or 'nobody'}; "
            f"requests that went on elsewhere {self.num_resumed}; "
            f"{self.faults.total()} faults: {kinds}"
        )


def requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Prompts share beginnings, so that blocks are shared, reused and evicted; temperatures and seeds vary."""
    rng = random.Random(seed)
    stems = [rng.choices(range(3, 500), k=400) for _ in range(3)]
    return [
        {
            "model": "test",
            "prompt": rng.choice(stems)[: rng.randrange(0, 400)] + rng.choices(range(3, 500), k=rng.randrange(1, 200)),
            "max_tokens": rng.randrange(2, 24),
            "temperature": rng.choice((0, 1)),
            "seed": rng.randrange(1000),
            "logprobs": 1,
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


async def ask_all(
    url: str, bodies: Sequence[dict[str, Any]], leave_after_s: dict[int, float], answers: Answers | None = None
) -> list[Any]:
    """(text, logprobs) of each, None of one that the client abandoned, the status of one that failed."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def ask(client: httpx.AsyncClient, i: int, body: dict[str, Any]) -> Any:
        async with gate:
            try:
                async with asyncio.timeout(leave_after_s.get(i)):
                    reply = await client.post(f"{url}/v1/completions", json=body)
            except TimeoutError:
                return None
        if answers is not None:
            await answers.add()
        if reply.status_code != httpx.codes.OK:
            return reply.status_code, reply.text
        (choice,) = reply.json()["choices"]
        return choice["text"], choice["logprobs"]["token_logprobs"]

    async with httpx.AsyncClient(timeout=90) as client:
        return await asyncio.gather(*(ask(client, i, body) for i, body in enumerate(bodies)))


class Chaos:
    """One prefill and two decode nodes. `kill` says at which passage of a fail point the first node of a role dies."""

    def __init__(self, nodes: Cluster, transports: str, rules: str, kill: dict[str, str]) -> None:
        self.nodes, self.summary = nodes, Summary()
        self._flags = ("--transports", transports, *FAST, "--fail-points-seed", str(SEED))
        self._rules = rules
        self.members = [self._start(role, kill.get(role, "")) for role in ("prefill", "decode")]
        self.members.append(self._start("decode", ""))
        for node in self.members:
            nodes.wait_node(node)
        gateway_rules = (
            ",".join(rule for rule in rules.split(",") if rule.startswith(("index", "rpc.session")))
            or "index.lookup=delay@1:1"
        )
        self.gateway: Gateway = nodes.start_gateway("--fail-points", gateway_rules, "--fail-points-seed", str(SEED))
        for node in self.members:
            wait_known(self.gateway, node)

    def _start(self, role: str, more: str, port: int | None = None) -> Node:
        flags = ("--local-prefill-max-tokens", "16") if role == "decode" else ()
        points = f"{self._rules},{more}" if more else self._rules
        return self.nodes.start_node(role, *flags, *self._flags, "--fail-points", points, wait=False, port=port)

    async def run(self, bodies: list[dict[str, Any]], want: list[Any]) -> None:
        """The second half is asked for when those that died in the first are back: new ones behind old addresses."""
        rng, started, half = random.Random(SEED), time.monotonic(), len(bodies) // 2
        got: list[Any] = []
        for part in (bodies[:half], bodies[half:]):
            leave = {i: rng.uniform(0, 0.5) for i in range(0, len(part), 7)}
            guard = asyncio.create_task(self._restart_what_dies())
            got += await ask_all(self.gateway.url, part, leave)
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)
            await asyncio.to_thread(self._wait_back)
        self.judge(got, want)
        self.summary.seconds = time.monotonic() - started

    def judge(self, got: list[Any], want: list[Any]) -> None:
        self.summary.num_requests = len(got)
        for answer, right in zip(got, want, strict=True):
            self.summary.num_abandoned += answer is None
            self.summary.num_errors += answer is not None and isinstance(answer[0], int)
            self.summary.num_wrong += answer is not None and isinstance(answer[0], str) and answer != right

    async def _restart_what_dies(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            self._restart_the_dead()

    def _restart_the_dead(self) -> None:
        for number, node in enumerate(self.members):
            assert node.popen is not None
            if node.popen.poll() is not None:
                self.summary.restarts[node.name] += 1
                self.nodes.processes.remove(node)
                self.members[number] = self._start(node.name, "", node.port)

    def _wait_back(self) -> None:
        self._restart_the_dead()
        for node in self.members:
            self.nodes.wait_node(node)
            wait_known(self.gateway, node)

    def settle(self) -> int:
        """Blocks and leases that are still owned when everything has had time to end."""
        deadline, leaks = time.monotonic() + SETTLE_S, 1
        while leaks and time.monotonic() < deadline:
            time.sleep(0.1)
            leaks = 0
            for node in self.members:
                load = node.record().load
                leaks += load.num_blocks - load.accounts.available + load.num_leases
                leaks += abs(load.accounts.total - load.num_blocks) + load.num_running + load.num_waiting
        return leaks

    def count_faults(self) -> None:
        for process in (*self.members, self.gateway):
            for point in POINTS:
                for action in POINTS[point]:
                    labels = {"point": point, "action": action.value}
                    if hits := process.metric("kvferry:fail_point_hits_total", **labels):
                        self.summary.faults[f"{point} {action.value}"] += int(hits)
        for node in self.members:
            self.summary.num_received += int(node.metric("kvferry:transfer_blocks_total"))
            caught = node.metric("kvferry:transfer_failures_total", cause="block_corrupt")
            self.summary.num_corrupt_blocks_caught += int(caught)
        for name in ("request_resumes", "request_retries"):
            self.summary.num_resumed += int(self.gateway.metric(f"kvferry:{name}_total"))


@pytest.fixture(scope="module")
def bodies() -> list[dict[str, Any]]:
    return requests(SEED, NUM_REQUESTS)


@pytest.fixture(scope="module")
def want(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, bodies: list[dict[str, Any]]
) -> list[tuple[str, list[float]]]:
    """The same requests on one node where nothing goes wrong."""
    with cluster(tmp_path_factory.mktemp("faultless"), str(tiny_model)) as nodes:
        nodes.start_node("both")
        return asyncio.run(ask_all(nodes.start_gateway().url, bodies, {}))


@contextlib.contextmanager
def chaos(folder: Path, model: Path, transports: str, rules: str, kill: dict[str, str]) -> Iterator[Chaos]:
    with cluster(folder, str(model)) as nodes:
        yield Chaos(nodes, transports, rules, kill)


KILL = {"prefill": "rpc.prefill.reply=kill@30", "decode": "rpc.decode.outputs=kill@8"}
"""Early: how many passages there are depends on how requests spread and how many tokens a message takes along."""


@pytest.mark.parametrize(
    ("transports", "kill"),
    [
        pytest.param("grpc", {}, id="grpc"),
        pytest.param("shm,grpc", KILL, id="shm,grpc,kill"),
        pytest.param(
            "ucx,grpc",
            KILL,
            id="ucx,grpc,kill",
            marks=pytest.mark.skipif(not HAS_UCX, reason="ucxx is not installed: pip install 'kvferry[ucx]'"),
        ),
    ],
)
def test_no_fault_changes_an_answer_or_leaks_a_block(
    tiny_model: Path,
    tmp_path: Path,
    bodies: list[dict[str, Any]],
    want: list[Any],
    transports: str,
    kill: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with chaos(tmp_path, tiny_model, transports, RULES, kill) as run:
        asyncio.run(run.run(bodies, want))
        leaks = run.settle()
        run.count_faults()
        with capsys.disabled():
            print(f"\nchaos over {transports}, seed {SEED}: {run.summary}; leaks = {leaks}")
        assert run.summary.num_wrong == 0
        assert run.summary.num_errors == 0
        assert leaks == 0
        assert run.summary.num_received > 0, "nothing was handed over at all"
        assert run.summary.faults.total() > 0  # those of a killed process are lost with it
        first = {"grpc": "transfer.grpc.chunk", "shm": "transfer.shm.copy", "ucx": "transfer.ucx.run"}
        point = first[transports.split(",")[0]]
        assert any(fault.startswith(point) for fault in run.summary.faults), f"nothing went wrong at {point}"
        if transports == "grpc":
            assert run.summary.num_corrupt_blocks_caught > 0
        assert run.summary.restarts == dict.fromkeys(kill, 1)
        if kill:
            assert run.summary.num_resumed > 0, "the decode node had nothing to lose when it died"


def test_the_chaos_run_would_see_a_wrong_block(
    tiny_model: Path, tmp_path: Path, bodies: list[dict[str, Any]], want: list[Any]
) -> None:
    """Shared memory has no checksums: bytes spoilt there reach the model, and the comparison must tell."""
    with chaos(tmp_path, tiny_model, "shm", "transfer.shm.copy=corrupt:1", {}) as run:
        asyncio.run(run.run(bodies, want))
        assert run.summary.num_wrong > 0


def test_whatever_happens_to_redis_every_answer_is_right_and_everything_is_known_again(
    tiny_model: Path, tmp_path: Path, bodies: list[dict[str, Any]], want: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """It hangs, is emptied, is killed, slow, and restarted, one after the other while requests run."""

    async def run(chaos_run: Chaos) -> list[str]:
        answers, started = Answers(), time.monotonic()
        troubles = asyncio.create_task(trouble(chaos_run.nodes, answers))
        chaos_run.judge(await ask_all(chaos_run.gateway.url, bodies, {}, answers), want)
        chaos_run.summary.seconds = time.monotonic() - started
        await answers.end()
        return await troubles

    with chaos(tmp_path, tiny_model, "shm,grpc", "index.lookup=delay@1:1", {}) as made:
        troubles = asyncio.run(run(made))
        for node in made.members:
            wait_known(made.gateway, node)
        leaks = made.settle()
        made.count_faults()
        with capsys.disabled():
            print(f"\nchaos of Redis, {', '.join(troubles)}: {made.summary}; leaks = {leaks}")
        assert made.summary.num_wrong == made.summary.num_errors == leaks == 0
        assert set(troubles) == {"hanging", "flushed", "killed", "slow", "restarted"}
        assert made.gateway.metric("kvferry:index_lookup_failures_total") > 0, "nobody has asked while it was away"
        assert made.summary.num_received > 0, "nothing was handed over at all"
        first = max((body["prompt"] for body in bodies[:AT_ONCE]), key=len)
        asyncio.run(_wait_found_again(made, first))


async def _wait_found_again(made: Chaos, prompt: Sequence[int]) -> None:
    """Nobody asks for this prompt again: what was computed before Redis lost it, its nodes have told it anew."""
    card = made.members[1].record().card
    names = block_names(root_name(card.model_fingerprint, card.numerics_id), prompt, card.block_size)
    index, deadline = RedisIndex(made.nodes.redis_url, timeout_s=10), time.monotonic() + RETURNED_S
    try:
        while max((found := (await index.match(names)).held).values(), default=0) < len(names):
            assert time.monotonic() < deadline, f"of {len(names)} blocks Redis knows {found}"
            await asyncio.sleep(0.1)
    finally:
        await index.aclose()
