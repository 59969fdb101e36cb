"""The Redis Cluster of `ha`: rendered arguments and the script, on loopback addresses, with pods that are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import redis

from kvferry.common.errors import IndexUnavailable
from kvferry.services.index.base import PrefixIndex
from kvferry.services.index.open import open_index
from tests.index.conformance import TTL_S, chain, node
from tests.index.redis_cluster import SLOTS, free_ports
from tests.index.servers import binaries
from tests.k8s.manifests import ROOT, arguments, of_kind

OVERLAY = "ha"
NAME = "127.0.0.1"  # leads to whichever pod has the name now, as a pod's DNS name does
WHOLE_S = 60


class Masters:
    """Pods of the StatefulSet: each new one has an address of its own, an empty Redis, and the script beside it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spec = of_kind(OVERLAY, "StatefulSet")["redis"]["spec"]
        self._binary = list(binaries().values())[-1]
        self._numbers = itertools.count(1)
        self.ports = free_ports(self._spec["replicas"])
        self.addresses: dict[int, str] = {}
        self._processes: dict[int, list[subprocess.Popen[bytes]]] = {}
        for ordinal in range(len(self.ports)):
            self.start(ordinal)

    def start(self, ordinal: int) -> None:
        number, port = next(self._numbers), self.ports[ordinal]
        address = self.addresses[ordinal] = f"127.77.1.{number}"
        data = self._folder / f"pod-{number}"
        data.mkdir()
        server, join = self._spec["template"]["spec"]["containers"]
        command = [str(self._binary), *arguments(server, {"POD_IP": address})]
        command += ["--port", str(port), "--bind", NAME, address, "--dir", str(data)]
        command += ["--cluster-node-timeout", "2000"]  # a third of the waiting
        environ = {item["name"]: item.get("value", "") for item in join["env"]} | {
            "PATH": f"{self._binary.parent}:{os.environ['PATH']}",
            "POD_NAME": f"redis-{ordinal}",
            "PEERS": " ".join(f"{NAME}:{port}" for port in self.ports),
            "SELF": f"{NAME}:{port}",
            "EVERY_S": "0.5",
        }
        script = ROOT / "k8s/overlays" / OVERLAY / Path(join["command"][-1]).name
        with (self._folder / f"pod-{number}.log").open("wb") as log:
            self._processes[ordinal] = [
                subprocess.Popen(command, stdout=log, stderr=log),
                subprocess.Popen([*join["command"][:-1], script], stdout=log, stderr=log, env=environ),
            ]

    def kill(self, ordinal: int) -> None:
        for process in self._processes.pop(ordinal):
            process.kill()
            process.wait()

    def stop(self) -> None:
        for ordinal in list(self._processes):
            self.kill(ordinal)

    @property
    def url(self) -> str:
        return f"redis://{NAME}:{self.ports[0]}/0?cluster=true"

    def ids(self) -> list[str]:
        return [str(self._ask(port, "CLUSTER", "MYID")) for port in self.ports]

    def become_whole(self, without: Sequence[int] = ()) -> None:
        present = [ordinal for ordinal in range(len(self.ports)) if ordinal not in without]
        deadline = time.monotonic() + WHOLE_S
        while faults := [fault for ordinal in present if (fault := self._fault(ordinal, present))]:
            logs = "".join(path.read_text() for path in sorted(self._folder.glob("pod-*.log")))
            assert time.monotonic() < deadline, f"{faults}\n{logs}"
            time.sleep(0.05)

    def make_replica(self, ordinal: int, of: int) -> None:
        slots = range(ordinal * SLOTS // len(self.ports), (ordinal + 1) * SLOTS // len(self.ports))
        with redis.Redis(host=NAME, port=self.ports[ordinal]) as client, client.pipeline() as commands:
            commands.execute_command("FLUSHALL")
            commands.execute_command("CLUSTER", "DELSLOTS", *slots)
            commands.execute_command("CLUSTER", "REPLICATE", self.ids()[of])
            commands.execute()

    def _ask(self, port: int, *command: str) -> object:
        with redis.Redis(host=NAME, port=port, decode_responses=True) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)

    def _fault(self, ordinal: int, present: Sequence[int]) -> str:
        """What this master finds amiss: each present one has its share; with all present, nobody else is known."""
        port = self.ports[ordinal]
        try:
            info, nodes = (str(self._ask(port, "CLUSTER", what)) for what in ("INFO", "NODES"))
        except redis.RedisError as exc:
            return repr(exc)
        edges = [number * SLOTS // len(self.ports) for number in range(len(self.ports) + 1)]
        wanted = {(f"{self.addresses[n]}:{self.ports[n]}", f"{edges[n]}-{edges[n + 1] - 1}") for n in present}
        lines = [line.split() for line in nodes.splitlines()]
        found = [(words[1].partition("@")[0], " ".join(words[8:])) for words in lines]
        is_fine = wanted <= set(found) and "cluster_state:ok" in info
        if len(present) == len(self.ports):
            is_fine &= len(found) == len(wanted) and f"cluster_slots_ok:{SLOTS}\r" in info
        return "" if is_fine else f"{port}: {nodes}{info}"


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Masters]:
    made = Masters(tmp_path_factory.mktemp("masters"))
    try:
        made.become_whole()
        yield made
    finally:
        made.stop()


@pytest.mark.parametrize("victims", [(1,), (0, 2)], ids=["one", "the majority"])
def test_pods_that_are_replaced_take_their_slots_again_and_the_index_finds_them(
    masters: Masters, victims: Sequence[int]
) -> None:
    async def run() -> None:
        index, names = open_index(masters.url, f"ha-{len(victims)}", timeout_s=20), chain(200)
        try:
            await _until_it_holds(index, names)
            before = masters.ids()
            for victim in victims:
                masters.kill(victim)
            if len(victims) == 1:
                assert (await index.match(names)).held["a"] >= 190, "the others tell who has the chain"
            for number, victim in enumerate(victims, 1):
                masters.start(victim)
                await asyncio.to_thread(masters.become_whole, without=victims[number:])
            after = masters.ids()
            assert {n for n in range(len(before)) if before[n] != after[n]} == set(victims)
            await _until_it_holds(index, names)
        finally:
            await index.aclose()

    asyncio.run(run())


def test_one_that_has_lost_its_slots_and_follows_another_begins_anew(masters: Masters) -> None:
    before = masters.ids()
    masters.make_replica(2, of=0)
    masters.become_whole()
    after = masters.ids()
    assert before[:2] == after[:2]
    assert before[2] != after[2]


async def _until_it_holds(index: PrefixIndex, names: list[bytes]) -> None:
    """What a node does with each heartbeat, until a lookup finds all of it."""
    deadline = time.monotonic() + WHOLE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(IndexUnavailable):
            await index.announce(node("a"), TTL_S)
            await index.store("a", names)
            if (await index.match(names)).held == {"a": len(names)}:
                return
        await asyncio.sleep(0.05)
    raise AssertionError("the index does not find what was stored")
