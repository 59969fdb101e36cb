"""`ucx_perftest`, which lies in ucxx's wheel, as the yardstick of transport `ucx`: the same library, the same wire.

It runs with UCX's defaults and what the user set, and with kvferry's settings in their place; polling and sleeping;
with endpoints that notice a dead peer (`-e`), as ours do, and without. Never over shared memory of processes: UCX
leaves that out for endpoints like ours.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.link import Link
from kvferry.services.transfer.ucx_thread import SETTINGS

MESSAGE_BYTES = 2**21
"""Two runs of blocks of ours."""
MODES = {"polling": (), "polling -e": ("-e",), "sleeping -e": ("-e", "-I", "-E", "sleep")}
"""Where cores are few the one that sleeps may be the faster."""
_NO_SHARED_MEMORY = {"UCX_TLS": "^cuda,sm"}
_NUM_MESSAGES = 300
_START_S, _LIMIT_S = 20.0, 30.0


def rates(wire: Link | None) -> dict[str, float]:
    """Bytes per second of tagged messages between two processes, over loopback or `wire`. Raises RuntimeError."""
    envs = environments()
    return {
        f"{whose} {mode}": _tag_rate(wire, MODES[mode], env if "-e" in MODES[mode] else _NO_SHARED_MEMORY | env)
        for whose, env in envs.items()
        for mode in MODES
    }


def environments() -> dict[str, dict[str, str]]:
    """With whose settings it runs."""
    ours = {f"UCX_{name}": value for name, value in SETTINGS.items() if name != "TLS"}
    return {"UCX's": dict(os.environ), "ours": ours | dict(os.environ)}


def _tag_rate(wire: Link | None, mode: Sequence[str], env: Mapping[str, str]) -> float:
    folder = libucx()
    libs = [folder / "lib", *folder.parent.glob("libucx_*.libs")]
    env = {**env, "LD_LIBRARY_PATH": os.pathsep.join(map(str, libs))}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [str(folder / "bin" / "ucx_perftest"), "-p", port, *mode]
    what = ["-t", "tag_bw", "-s", str(MESSAGE_BYTES), "-n", str(_NUM_MESSAGES), "-w", "20", "-f"]
    serve, host = (wire.owner.command(*command), wire.owner.address) if wire else (command, "127.0.0.1")
    with subprocess.Popen(serve, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(int(port), server)
            done = subprocess.run(
                [*command, host, *what], env=env, capture_output=True, text=True, timeout=_LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:  # the one that sleeps misses its wake-up now and then
            return 0.0
        finally:
            server.kill()
    rows = [line.split() for line in done.stdout.splitlines() if line.split()[:1] == [str(_NUM_MESSAGES)]]
    if not rows:
        raise RuntimeError(f"ucx_perftest: {done.stderr.strip() or done.stdout.strip()}")
    return float(rows[-1][-3]) * 2**20  # MB/s overall, before the two message rates


def libucx() -> Path:
    """Where its programs and libraries lie. Raises RuntimeError when it is not installed."""
    spec = find_spec("libucx")
    if spec is None or spec.origin is None:
        raise RuntimeError("libucx is not installed: pip install 'kvferry[ucx]'")
    return Path(spec.origin).parent


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    """Until it listens: looked up, not tried, since it serves one connection only."""
    deadline, wanted, table = time.monotonic() + _START_S, f":{port:04X} ", Path(f"/proc/{server.pid}/net/tcp")
    while not any(wanted in line and " 0A " in line for line in table.read_text().splitlines()):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the server of ucx_perftest does not come up")
        time.sleep(0.02)
