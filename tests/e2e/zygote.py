"""Starts `kvferry` processes that have their imports behind them: importing torch takes most of a small node's start.

One JSON object per line on both sides: {"args", "env", "log"} is answered by {"pid"}, {"pid"} by {"status"}, which is
None while the process runs, and then as `subprocess.Popen.returncode`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from kvferry.common.cores import NODE_ENVIRON

IMPORTS = (
    "kvferry.services.local.cli",
    "kvferry.services.gateway.server",
    "kvferry.services.node.runtime",
    "kvferry.services.decode.service",
    "kvferry.services.prefill.service",
)

_asking = threading.Lock()
"""An answer belongs to the question before it, whichever thread of a test asks."""


class Forked:
    """What tests use of `subprocess.Popen`, of a `kvferry` process with these arguments."""

    def __init__(self, args: list[str], env: dict[str, str], log: Path) -> None:
        self.returncode: int | None = None
        self.pid: int = _ask(args=args, env=env, log=str(log))["pid"]

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask(pid=self.pid)["status"]
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("kvferry", timeout)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until asked, the zygote does not reap it: the pid is no other's
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _zygote() -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.e2e.zygote"]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env=NODE_ENVIRON | os.environ,  # some is read when libraries are loaded
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


def _ask(**request: Any) -> dict[str, Any]:
    with _asking:
        process = _zygote()
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(request), file=process.stdin, flush=True)
        reply: dict[str, Any] = json.loads(process.stdout.readline())
    return reply


def _become_kvferry(args: list[str], env: dict[str, str], log: str) -> int:
    """In the child: whatever a fresh process has for its own."""
    with open(os.devnull, "rb") as nothing, open(log, "ab") as out:
        os.dup2(nothing.fileno(), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    sys.argv = ["kvferry", *args]
    from kvferry.services.local.cli import main

    return main()


def _serve() -> None:
    for module in IMPORTS:
        __import__(module)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again in every child
    for line in sys.stdin:
        request = json.loads(line)
        if "args" in request:
            pid = os.fork()
            if pid == 0:
                sys.exit(_become_kvferry(**request))
            reply = {"pid": pid}
        else:
            done, status = os.waitpid(request["pid"], os.WNOHANG)
            reply = {"status": os.waitstatus_to_exitcode(status) if done else None}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    _serve()
