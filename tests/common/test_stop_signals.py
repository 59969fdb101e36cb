"""A process that has drained keeps its own exit status, whatever it is sent while it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, atexit, os, signal
from kvferry.common.stop_signals import stop_signals

async def run():
    stop = asyncio.Event()
    with stop_signals(stop.set, signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), signal.{number})
        await stop.wait()
        print("stopped")

asyncio.run(run())
os.kill(os.getpid(), signal.{number})
atexit.register(os.kill, os.getpid(), signal.{number})
raise SystemExit(7)
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_repeated_signal_does_not_change_the_exit_status(number: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(number=number)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("stopped\n", 7), done.stderr
