"""Small programs for a supervisor to run, and what is left of them."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from kvferry.services.local.console import Console
from kvferry.services.local.supervisor import Program

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


def program(name: str, code: str, *, ready: Callable[[], bool] = lambda: True, **options) -> Program:
    """`code` run by this Python."""

    async def is_ready() -> bool:
        return ready()

    return Program(name, (sys.executable, "-c", code), is_ready, **options)


def recording_console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(out), out


def wait_until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Runs, or is about to: a zombie that nobody has collected yet does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pid(path: Path) -> int:
    """The process id that a child writes to `path` when it is up."""
    wait_until(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def write_pid(path: Path) -> str:
    """Code that does so."""
    return f"import os, pathlib; pathlib.Path({str(path)!r}).write_text(str(os.getpid())); "


def environ_without_kvferry() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY")}
