"""A real Redis Cluster of three masters on loopback."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import redis
import trustme

SLOTS = 16384
_BUS = 10_000  # a node's bus port lies so far above its own


def free_ports(count: int) -> list[int]:
    """Below the ephemeral range, so that nobody's outgoing connection takes one; the bus port is free too."""
    found: list[int] = []
    while len(found) < count:
        port = random.randint(10_000, 22_000)
        try:
            for number in (port, port + _BUS):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        found.append(port)
    return found


class Secured:
    """A password, an authority, and a certificate that it has signed for loopback: what a Redis with TLS is given."""

    password = "secret"

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1", "localhost")
        self.authority, self._certificate, self._key = (folder / f"{name}.pem" for name in ("ca", "cert", "key"))
        authority.cert_pem.write_to_path(self.authority)
        certificate.cert_chain_pems[0].write_to_path(self._certificate)
        certificate.private_key_pem.write_to_path(self._key)

    def flags(self, port: int) -> list[str]:
        files = [
            "--tls-cert-file",
            self._certificate,
            "--tls-key-file",
            self._key,
            "--tls-ca-cert-file",
            self.authority,
        ]
        return [
            *("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no"),
            *("--requirepass", self.password, *map(str, files)),
        ]

    def url(self, address: str) -> str:
        return f"rediss://:{self.password}@{address}?ssl_ca_certs={self.authority}"


class RedisCluster:
    """Each master has a third of the slots. Nothing is kept on disk but the map of the cluster."""

    def __init__(self, binary: Path, folder: Path, secured: Secured | None = None) -> None:
        self._binary, self._folder, self.secured = binary, folder, secured
        self.ports = free_ports(3)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for port in self.ports:
            self.start(port)
        first, *others = self.ports
        edges = [0, 5461, 10923, SLOTS]
        for port, begin, end in zip(self.ports, edges, edges[1:], strict=False):
            self.admin(port).execute_command("CLUSTER", "ADDSLOTS", *range(begin, end))
        for port in others:
            self.admin(first).execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        self._wait(lambda: all(self._is_whole(port) for port in self.ports))

    @property
    def url(self) -> str:
        address = f"127.0.0.1:{self.ports[0]}"
        return f"{self.secured.url(address)}&cluster=true" if self.secured else f"redis://{address}?cluster=true"

    def admin(self, port: int) -> redis.Redis:
        if self.secured is None:
            return redis.Redis(port=port)
        return redis.Redis(port=port, ssl=True, ssl_ca_certs=self.secured.authority, password=self.secured.password)

    def start(self, port: int) -> None:
        command = [self._binary, "--bind", "127.0.0.1", "--cluster-enabled", "yes", "--save", ""]
        if self.secured is None:
            command += ["--port", str(port)]
        else:
            command += [*self.secured.flags(port), "--tls-cluster", "yes", "--masterauth", self.secured.password]
        command += ["--cluster-config-file", f"nodes-{port}.conf", "--dir", str(self._folder), "--loglevel", "warning"]
        command += ["--cluster-node-timeout", "1000", "--cluster-require-full-coverage", "no"]
        self._processes[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._wait(lambda: self._pings(port))

    def kill(self, port: int) -> None:
        self._processes[port].kill()
        self._processes[port].wait()

    @contextlib.contextmanager
    def frozen(self, port: int):
        self._processes[port].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[port].send_signal(signal.SIGCONT)

    def move_keys(self, slot: int, source: int, target: int) -> None:
        """The slot's keys are at `target` then; `source` is still its master, and says ASK."""
        ids = {port: self.admin(port).execute_command("CLUSTER", "MYID").decode() for port in (source, target)}
        self.admin(target).execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        self.admin(source).execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        keys = self.admin(source).execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        login = ["AUTH", self.secured.password] if self.secured else []
        self.admin(source).execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, *login, "KEYS", *keys)

    def finish_move(self, slot: int, source: int, target: int) -> None:
        owner = self.admin(target).execute_command("CLUSTER", "MYID").decode()
        for port in (target, source):
            self.admin(port).execute_command("CLUSTER", "SETSLOT", slot, "NODE", owner)

    def stop(self) -> None:
        for port in self.ports:
            self.kill(port)

    def master_of(self, slot: int) -> int:
        return self.ports[0 if slot < 5461 else 1 if slot < 10923 else 2]

    def _pings(self, port: int) -> bool:
        try:
            return bool(self.admin(port).ping())
        except redis.RedisError:
            return False

    def _is_whole(self, port: int) -> bool:
        with self.admin(port) as client:
            slots = client.execute_command("CLUSTER", "SLOTS")
            info = client.execute_command("CLUSTER", "INFO")
        state = info["cluster_state"] if isinstance(info, dict) else info.decode()
        return len(slots) == 3 and (state == "ok" or "cluster_state:ok" in state)

    def _wait(self, condition) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the Redis Cluster did not come up"
            time.sleep(0.02)
