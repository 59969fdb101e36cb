"""Owners to be killed, one after the other: for each line of standard input a fork, so that none has to load everything
anew. The line says how many blocks, their size, transports and fail points.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys

from kvferry.services.transfer.conformance.__main__ import run


def fork_owners() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if os.fork() == 0:
            num_blocks, block_bytes, offers, faults = json.loads(line)
            asyncio.run(run(num_blocks, block_bytes, 0.0, secrets.token_hex(8), 0, offers, faults=faults))


if __name__ == "__main__":
    fork_owners()
