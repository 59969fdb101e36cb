"""Hosts that share a kernel and nothing else: a network, a /dev/shm and System V memory of its own for each.

    test process ──── 198.19.0.0/16, never cut ──── each host
                                        host ── link ──┐
                                        host ── link ──┤ a switch in a namespace of its own, 198.18.0.0/24
                                        host ── link ──┘

`silence` takes a host's port out of the switch: its link stays up, and whatever is sent vanishes, as on a half-open
network. `cut` takes the link down at the host, whose own sends then fail. `limit` is a token bucket on what the host
sends, and `lose` one behind which hardly anything may wait: what comes too fast is dropped. Needs root and iproute2;
`missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import Host

_NUMBERS = itertools.count()
_OWN_MEMORY = 'mount -t tmpfs -o size=2g tmpfs /dev/shm && exec "$@"'


def missing() -> str:
    """Why there can be no network namespaces here; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]:
        return f"not installed: {', '.join(absent)} (iproute2, util-linux)"
    name = f"kvferry-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "probe", "type", "bridge")
        _run("ip", "netns", "exec", name, "unshare", "--ipc", "sh", "-c", _OWN_MEMORY, "sh", "true")
    except OSError as exc:
        return f"this kernel gives no network namespaces with bridges: {exc}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


@dataclass(frozen=True)
class NetworkHost:
    """`address` is the one on the switch, by which hosts know each other."""

    name: str
    namespace: str
    address: str
    on: Host
    _switch: str

    def silence(self) -> None:
        _run("ip", "-n", self._switch, "link", "set", "dev", self.name, "nomaster")

    def cut(self) -> None:
        _run("ip", "-n", self.namespace, "link", "set", "dev", "link", "down")

    def restore(self) -> None:
        """After `silence` or `cut`."""
        _run("ip", "-n", self.namespace, "link", "set", "dev", "link", "up")
        _run("ip", "-n", self._switch, "link", "set", "dev", self.name, "master", "switch")

    def limit(self, rate: str) -> None:
        """`rate` as tc writes it: 50mbit."""
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "link", "root", *shape)

    def lose(self, rate: str) -> None:
        """From now on packets are lost when more than a few come at once."""
        shape = ("tbf", "rate", rate, "burst", "16kb", "limit", "24kb")
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "link", "root", *shape)

    @property
    def num_lost(self) -> int:
        """Packets that `lose` has dropped."""
        (queue,) = json.loads(_run("tc", "-n", self.namespace, "-s", "-j", "qdisc", "show", "dev", "link"))
        return int(queue["drops"])

    def reaches(self, address: str) -> bool:
        """Whether there is a route."""
        try:
            return bool(_run("ip", "-n", self.namespace, "route", "get", address))
        except OSError:
            return False

    @property
    def sent_bytes(self) -> int:
        """Over the switch, since the beginning."""
        (link,) = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", "link"))
        return int(link["stats64"]["tx"]["bytes"])


class Network:
    """Makes hosts. Whatever happens, `close` leaves nothing of them: the kernel takes links with their namespaces."""

    def __init__(self) -> None:
        self._number = next(_NUMBERS)
        self._prefix = f"kvferry-{os.getpid()}-{self._number}"
        self._namespaces: list[str] = []
        self._num_hosts = 0
        self._switch = self._add_namespace("switch")
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "dev", "switch", "up")

    def add_host(self, name: str, *, own_memory: bool = True) -> NetworkHost:
        """Without `own_memory` it shares /dev/shm with the machine, as containers of one pod may."""
        self._num_hosts += 1
        number, namespace = self._num_hosts, self._add_namespace(name)
        address, base = f"198.18.0.{number}", f"198.19.{self._number}"
        outer = f"kvf{os.getpid() % 10**6}-{self._number}{number}"
        ours, theirs = f"{base}.{4 * number + 1}", f"{base}.{4 * number + 2}"
        _run(
            "ip",
            "-n",
            namespace,
            "link",
            "add",
            "name",
            "link",
            "type",
            "veth",
            "peer",
            "name",
            name,
            "netns",
            self._switch,
        )
        _run("ip", "-n", self._switch, "link", "set", "dev", name, "up", "master", "switch")
        _run(
            "ip",
            "-n",
            namespace,
            "link",
            "add",
            "name",
            "test",
            "type",
            "veth",
            "peer",
            "name",
            outer,
            "netns",
            str(os.getpid()),
        )
        _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "link")
        _run("ip", "-n", namespace, "addr", "add", f"{theirs}/30", "dev", "test")
        _run("ip", "addr", "add", f"{ours}/30", "dev", outer)
        for device in ("lo", "link", "test"):
            _run("ip", "-n", namespace, "link", "set", "dev", device, "up")
        _run("ip", "link", "set", "dev", outer, "up")
        prefix = ("ip", "netns", "exec", namespace, "unshare", "--ipc")
        prefix += ("env", "UCX_NET_DEVICES=link")
        if own_memory:
            prefix += ("sh", "-c", _OWN_MEMORY, "sh")
        return NetworkHost(name, namespace, address, Host(theirs, prefix), self._switch)

    def close(self) -> None:
        for namespace in reversed(self._namespaces):
            with contextlib.suppress(OSError):
                _run("ip", "netns", "del", namespace)
        self._namespaces.clear()

    def _add_namespace(self, name: str) -> str:
        namespace = f"{self._prefix}-{name}"
        _run("ip", "netns", "add", namespace)
        self._namespaces.append(namespace)
        return namespace


@contextlib.contextmanager
def network() -> Iterator[Network]:
    sweep()
    made = Network()
    try:
        yield made
    finally:
        made.close()


def sweep() -> None:
    """Removes what test runs that were killed have left."""
    for found in json.loads(_run("ip", "-j", "netns", "list") or "[]"):
        prefix, _, rest = str(found["name"]).partition("-")
        pid = rest.partition("-")[0]
        if prefix == "kvferry" and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            for left in _run("ip", "netns", "pids", found["name"]).split():
                os.kill(int(left), signal.SIGKILL)
            _run("ip", "netns", "del", found["name"])


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
