"""Copies of a small world, and what makes two of them the same state. Knows every field that matters of what it copies.

By hand, as `copy.deepcopy` would take most of an exploration's time.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import TypeVar

from kvferry.services.transfer.protocol import Offer, ReaderSide
from tests.transfer.small_world import Message, Node, World

T = TypeVar("T")


def _flat(thing: T) -> T:
    """A copy with containers of its own; what they contain is shared."""
    new = copy.copy(thing)
    vars(new).update((k, v.copy()) for k, v in vars(thing).items() if isinstance(v, list | dict | set | deque))
    return new


def clone(world: World) -> World:
    new = _flat(world)
    new.budgets = copy.copy(world.budgets)
    new.owner, new.reader = _clone_node(world.owner), _clone_node(world.reader)
    pool, new.leases = new.owner.pool, _flat(world.leases)
    vars(new.leases).update(_pin=pool.pin, _unpin=pool.unpin, _clock=new.clock)
    new.leases._leases = {
        lease_id: replace(lease, block_ids=dict(lease.block_ids)) for lease_id, lease in world.leases._leases.items()
    }
    for p, run in world.runs.items():
        new.runs[p] = copied = replace(run, side=_flat(run.side), block_ids=list(run.block_ids))
        copied.side._leases = new.leases
    for p, receive in world.receives.items():
        source = new.owner.memory if receive.source is world.owner.memory else receive.source
        new.receives[p] = replace(receive, side=_flat(receive.side), source=source, pairs=list(receive.pairs))
    return new


def _clone_node(node: Node) -> Node:
    new = _flat(node)
    new.pool = _flat(node.pool)
    new.pool._blocks = [copy.copy(block) for block in node.pool._blocks]
    new.memory = [list(row) for row in node.memory]
    return new


def fingerprint(world: World) -> object:
    ids: dict[str, int] = {}  # lease ids are random: numbered as they are met
    runs = []
    for p, run in sorted(world.runs.items()):
        side = run.side
        runs.append((p, side.state, side._num_pinned, side._num_reported, *run.block_ids, run.num_filled))
        ids.setdefault(side.lease_id, len(ids))
    leases = tuple(
        (ids.get(lease.lease_id, -1), max(lease.expires_at - world.now, 0.0), tuple(lease.block_ids))
        for lease in world.leases._leases.values()
    )
    receives = tuple(
        (
            p,
            *_side_state(r.side),
            *r.block_ids,
            *r.pairs,
            r.halves,
            r.is_computed,
            r.source is not world.owner.memory and _rows(r.source),
        )
        for p, r in sorted(world.receives.items())
    )
    wires = tuple(tuple(_without_id(m) for m in queue) for queue in (*world.to_owner, *world.to_reader))
    nodes = tuple(_node_state(node) for node in (world.owner, world.reader))
    return (nodes, tuple(runs), leases, receives, wires, tuple(world.outcomes), *vars(world.budgets).values())


def _side_state(side: ReaderSide) -> tuple[object, ...]:
    return (side.state, side._num_offered, side._num_copied, side.num_blocks)


def _rows(memory: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(map(tuple, memory))


def _without_id(message: Message) -> Message:
    match message:
        case ("accepted", _, num_blocks):
            return ("accepted", num_blocks)
        case ("filled", Offer(first, block_ids)):
            return ("filled", first, *block_ids)
    return message


def _node_state(node: Node) -> object:
    pool = node.pool
    blocks = tuple((b.num_sequences, b.num_pins, b.incoming, b.name) for b in pool._blocks)
    return (blocks, tuple(pool._free), tuple(pool._cached), _rows(node.memory))
