"""An owner of blocks as a process of its own, for tests that kill or freeze it: see conformance.owner_process.

Without arguments it makes many, one after the other: for each line of standard input a fork, so that none has to load
everything anew. The line says block size, transports and fail points.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterable

from kvferry.common.fail_points import FailPoints
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.segment import PoolSegment
from tests.transfer.conformance import SHM_DIR, fill, serve


class SlowLeases(LeaseTable):
    """Each look at a lease takes a while, and with it each run that is sent."""

    slow_s = 0.0

    def check(self, lease_id: str, block_ids: Iterable[int]) -> None:
        time.sleep(self.slow_s)
        super().check(lease_id, block_ids)


async def main(
    num_blocks: int, block_bytes: int, slow_s: float, instance_id: str, port: int, offers: str, faults: str = ""
) -> None:
    leases = SlowLeases(lambda _: None, lambda _: None, lease_s=60.0)
    leases.slow_s = slow_s
    segment = PoolSegment.create(SHM_DIR, instance_id, num_blocks, block_bytes)
    fill(segment)
    async with serve(
        segment,
        instance_id=instance_id,
        leases=leases,
        port=port,
        transports=offers.split(","),
        fail_points=FailPoints(faults),
    ) as owner:
        lease_id = owner.lease(range(num_blocks))
        said = {"address": owner.address, "instance_id": instance_id, "lease_id": lease_id, "path": segment.path}
        said["pid"] = os.getpid()
        print(json.dumps(said), flush=True)
        await asyncio.Event().wait()


def fork_owners() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        if os.fork() == 0:
            num_blocks, block_bytes, offers, faults = json.loads(line)
            asyncio.run(main(num_blocks, block_bytes, 0.0, secrets.token_hex(8), 0, offers, faults))


if __name__ == "__main__" and len(sys.argv) == 1:
    fork_owners()
elif __name__ == "__main__":
    _, num_blocks, block_bytes, slow_s, instance_id, port, offers = sys.argv
    asyncio.run(main(int(num_blocks), int(block_bytes), float(slow_s), instance_id, int(port), offers))
