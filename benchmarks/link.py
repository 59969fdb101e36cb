"""A wire of a given rate between two network namespaces of this machine. Needs root and iproute2; knows no transport.

    owner 198.18.7.1 ─── veth, each end behind a token bucket of `rate` ─── reader 198.18.7.2

The rate is what tc counts: frames with their headers, so that TCP's payload is at most 95.6 % of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_CLONE_NEWNET, _CLONE_NEWNS = 0x4000_0000, 0x2_0000
_MS_REC, _MS_SLAVE = 0x4000, 0x8_0000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class End:
    """Of a wire."""

    namespace: str
    address: str

    def enter(self) -> None:
        """Puts this process there for good, before it starts threads; with a /sys that shows its devices to UCX."""
        with open(f"/run/netns/{self.namespace}") as handle:
            _check(_libc.setns(handle.fileno(), _CLONE_NEWNET))
        _check(_libc.unshare(_CLONE_NEWNS))
        _check(_libc.mount(b"", b"/", None, ctypes.c_ulong(_MS_REC | _MS_SLAVE), None))
        _check(_libc.mount(self.namespace.encode(), b"/sys", b"sysfs", ctypes.c_ulong(0), None))

    def command(self, *arguments: str) -> list[str]:
        """To be run there."""
        return ["ip", "netns", "exec", self.namespace, *arguments]


@dataclass(frozen=True)
class Link:
    owner: End
    reader: End


@contextlib.contextmanager
def link(rate: str) -> Iterator[Link]:
    """`rate` as tc writes it: 10gbit. Raises SystemExit that says what is lacking."""
    if os.geteuid() != 0 or shutil.which("tc") is None or shutil.which("ip") is None:
        raise SystemExit("--link needs root and iproute2")
    ends = tuple(End(f"kvferry-link-{os.getpid()}-{i}", f"198.18.7.{i}") for i in (1, 2))
    try:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
        one, other = (("netns", end.namespace) for end in ends)
        _run("ip", "link", "add", "wire", *one, "type", "veth", "peer", "name", "wire", *other)
        for end in ends:
            _run("ip", "-n", end.namespace, "addr", "add", f"{end.address}/24", "dev", "wire")
            _run("ip", "-n", end.namespace, "link", "set", "lo", "up")
            _run("ip", "-n", end.namespace, "link", "set", "wire", "up")
            shape = ("tbf", "rate", rate, "burst", "1mb", "latency", "20ms")
            _run("tc", "-n", end.namespace, "qdisc", "add", "dev", "wire", "root", *shape)
        yield Link(*ends)
    finally:  # the wire goes with them, once the last process has left
        for end in ends:
            subprocess.run(["ip", "netns", "del", end.namespace], capture_output=True, check=False)


def _check(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), f"--link: {os.strerror(ctypes.get_errno())}")


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise SystemExit(f"--link: {' '.join(command)}: {done.stderr.strip()}")
