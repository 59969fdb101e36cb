"""The simulated router knows of a node's load what its last heartbeat told, not what it is."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from kvferry.common.nodes import NodeLoad
from kvferry.services.local.simulate.cluster import Fleet, Simulation
from kvferry.services.local.simulate.node import SimNode
from kvferry.services.local.simulate.policies import POLICIES, Choice, Snapshot
from kvferry.services.local.simulate.profile import load_profile
from kvferry.services.local.simulate.trace import Request, synthetic

PROFILE = load_profile().faster(40.0, 2048)


class Watched(Simulation):
    """Keeps what each node has announced, and compares at each choice what the router is shown."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet, PROFILE, self._choose)
        self.told: dict[str, list[tuple[float, NodeLoad]]] = defaultdict(list)
        self.oldest_s = 0.0
        self.num_stale = 0

    async def _announce(self, node: SimNode) -> None:
        await super()._announce(node)
        name = node.record.instance_id
        (load,) = (record.load for record in (await self.index.nodes()).records if record.instance_id == name)
        self.told[name].append((self.now_s, load))

    def _choose(self, request: Request, seen: Snapshot, rng: random.Random) -> Choice:
        for record in seen[0]:
            times = [at_s for at_s, load in self.told[record.instance_id] if load == record.load]
            assert times, "a load that no heartbeat has told"
            self.oldest_s = max(self.oldest_s, self.now_s - times[-1])
            self.num_stale += record.load != self.nodes[record.instance_id].load()
        return POLICIES["kvferry"](request, seen, rng)


@pytest.mark.parametrize("heartbeat_s", [0.5, 2.0])
def test_the_router_sees_loads_as_heartbeats_told_them(heartbeat_s: float) -> None:
    sim = Watched(Fleet(2, 2, heartbeat_s=heartbeat_s))
    asyncio.run(sim.run(synthetic("chat", 60, 3.0)))
    assert all(len({load for _, load in told}) > 3 for told in sim.told.values()), "hardly anything happened"
    assert sim.num_stale > 60, "it sees what is"
    assert sim.oldest_s <= 2 * heartbeat_s, "its own and the node's: not what it was before"
