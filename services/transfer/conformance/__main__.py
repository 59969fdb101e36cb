"""An owner of blocks as a process of its own, for tests that kill or freeze it: `owners.owner_process`.

It says one line of JSON: address, instance_id, lease_id, path of the pool (to be removed behind it), pid. Somebody
else's owner is a program of his own that calls `main` with his `serve`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager

from kvferry.common.fail_points import FailPoints
from kvferry.services.transfer.conformance.owners import SHM_DIR, Owner, fill, serve
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.segment import PoolSegment

Serve = Callable[..., AbstractAsyncContextManager[Owner]]
"""Takes what `owners.serve` takes."""


class SlowLeases(LeaseTable):
    """Each look at a lease takes a while, and with it each run that is sent."""

    slow_s = 0.0

    def check(self, lease_id: str, block_ids: Iterable[int]) -> None:
        time.sleep(self.slow_s)
        super().check(lease_id, block_ids)


async def run(
    num_blocks: int,
    block_bytes: int,
    slow_s: float,
    instance_id: str,
    port: int,
    offers: str,
    *,
    faults: str = "",
    serve: Serve = serve,
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
        print(json.dumps(said | {"pid": os.getpid()}), flush=True)
        await asyncio.Event().wait()


def main(serve: Serve = serve) -> None:
    _, num_blocks, block_bytes, slow_s, instance_id, port, offers = sys.argv
    asyncio.run(run(int(num_blocks), int(block_bytes), float(slow_s), instance_id, int(port), offers, serve=serve))


if __name__ == "__main__":
    main()
