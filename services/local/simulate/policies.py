"""How a request finds its nodes: the real router, and what others do."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvferry.common.nodes import NodeRecord, Role
from kvferry.services.gateway.nodes import Ledger, LedgerEntry
from kvferry.services.gateway.plan import InFlight, RouteRequest
from kvferry.services.gateway.router import choose
from kvferry.services.local.simulate.trace import Request

Snapshot = tuple[Sequence[NodeRecord], Mapping[str, int], Ledger]
"""Node records as last announced, leading blocks by instance, and what this gateway has on each node."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Instances. `prefill` None: the decode node computes. `entry` is closed when the request ends."""

    decode: str
    prefill: str | None
    entry: LedgerEntry


Policy = Callable[[Request, Snapshot, random.Random], Choice]


def kvferry(request: Request, seen: Snapshot, rng: random.Random) -> Choice:
    nodes, matches, ledger = seen
    asked = RouteRequest(
        str(request.number), request.num_tokens, ledger.in_flight, coming=ledger.coming([request.blocks])
    )
    plan = choose(asked, nodes, matches)
    prefill = plan.prefill[0].instance_id if plan.prefill else None
    return Choice(plan.decode.instance_id, prefill, ledger.open(plan, 1, {plan.decode.card.naming: request.blocks}))


def _pick(best: Callable[[Request, Snapshot, NodeRecord], float]) -> Policy:
    """The prefill and the decode node that are least by `best`, ties at random."""

    def policy(request: Request, seen: Snapshot, rng: random.Random) -> Choice:
        nodes, _, ledger = seen

        def least(group: list[NodeRecord]) -> str:
            return min(group, key=lambda n: (best(request, seen, n), rng.random())).instance_id

        decode = least([n for n in nodes if n.role is not Role.PREFILL])
        prefill = [n for n in nodes if n.role is Role.PREFILL]
        computes = least(prefill) if prefill else decode
        entry = ledger.enter(decode, computes, InFlight(1, request.num_tokens))
        return Choice(decode, computes if prefill else None, entry)

    return policy


def _load(request: Request, seen: Snapshot, node: NodeRecord) -> float:
    """Tokens that a prefill node has to compute; requests that a decode node has."""
    mine = seen[2].in_flight.get(node.instance_id)
    if node.role is Role.PREFILL:
        return node.load.num_waiting_tokens + (mine.num_prompt_tokens if mine else 0)
    return max(node.load.num_running + node.load.num_waiting, mine.num_requests if mine else 0)


def _turn(request: Request, seen: Snapshot, node: NodeRecord) -> float:
    """Round robin: nodes of a role are numbered from 0 in their name's order."""
    group = [n.instance_id for n in seen[0] if (n.role is Role.PREFILL) == (node.role is Role.PREFILL)]
    return (group.index(node.instance_id) - request.number) % len(group)


POLICIES: dict[str, Policy] = {
    "random": _pick(lambda request, seen, node: 0.0),
    "round robin": _pick(_turn),
    "least loaded": _pick(_load),
    "prefix only": _pick(lambda request, seen, node: -seen[1].get(node.instance_id, 0)),
    "kvferry": kvferry,
}
