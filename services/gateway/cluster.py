"""What this gateway knows of its cluster, as JSON: `/cluster`, and for those who watch `/cluster/live`.

Every node is asked how it is at this moment, in parallel and over channels that stay open. Watchers share what was
asked for one of them, so that their number costs the requests nothing.

Of several worker processes each knows its own requests, sessions and latencies; the nodes are the same for all.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import fields
from itertools import islice
from typing import Any

import grpc
import orjson

from kvferry.common.nodes import NodeRecord, NodeState
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.gateway.alerts import GatewayView, NodeView, find_alerts
from kvferry.services.gateway.serving import Service

STATS_TIMEOUT_S = 0.5
MAX_AGE_S = 0.5  # of what watchers are shown
NUM_SHOWN = 40
LEFT_SHOWN_S = 300.0


class ClusterView:
    """`close` at the end: it holds a channel to each node. Methods may run side by side; the nodes are asked once."""

    def __init__(
        self,
        service: Service,
        model: str,
        version: str,
        num_workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._model = model
        self._version = version
        self._num_workers = num_workers
        self._clock = clock
        self._asking = asyncio.Lock()
        self._asked_at = float("-inf")
        self._nodes: list[NodeView] = []
        self._live: bytes = b""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._last_seen: dict[str, tuple[float, NodeState]] = {}

    async def state(self) -> dict[str, Any]:
        """For `/cluster`, as orjson takes it. Of a node that does not answer in time the last record, `live` false."""
        async with self._asking:
            await self._ask(not_before=self._clock())
            return self._state()

    async def live(self) -> bytes:
        """For `/cluster/live`: JSON, at most `MAX_AGE_S` old."""
        not_before = self._clock() - MAX_AGE_S
        async with self._asking:
            if await self._ask(not_before) or not self._live:
                self._live = orjson.dumps(self._state() | self._watched())
            return self._live

    def note_nodes(self) -> None:
        """The node table is fresh: remembers who is there, to tell who has left."""
        now = self._clock()
        self._last_seen |= {node.node_id: (now, node.state) for node in self._service.table.nodes}
        self._last_seen = {name: seen for name, seen in self._last_seen.items() if now - seen[0] < LEFT_SHOWN_S}

    async def close(self) -> None:
        async with self._asking:
            for channel in self._channels.values():
                await channel.close()
            self._channels.clear()

    # ---- inside

    async def _ask(self, not_before: float) -> bool:
        """Asks the nodes, unless somebody did since then; True if asked. Under the lock."""
        if self._asked_at >= not_before:
            return False
        began_at = self._clock()
        records = self._service.table.nodes
        for address in self._channels.keys() - {record.address for record in records}:
            await self._channels.pop(address).close()
        self._nodes = await asyncio.gather(*map(self._view, records))
        self._asked_at = began_at
        return True

    async def _view(self, record: NodeRecord) -> NodeView:
        if record.address not in self._channels:
            self._channels[record.address] = self._service.pool.dial(record.address)
        try:
            call = pb_grpc.NodeStub(self._channels[record.address]).Stats(pb.StatsRequest(), timeout=STATS_TIMEOUT_S)
            live = NodeRecord.from_json((await call).record_json)
        except (grpc.RpcError, ValueError):
            return NodeView(record, live=False)
        return NodeView(live, live=True) if live.instance_id == record.instance_id else NodeView(record, live=False)

    def _state(self) -> dict[str, Any]:
        service = self._service
        table, pool = service.table, service.pool
        return {
            "model": self._model,
            "version": self._version,
            "ready": bool(table.ready_decode) and not service.draining,
            "draining": service.draining,
            "max_model_len": table.max_model_len,
            "worker": {"pid": os.getpid(), "num_workers": self._num_workers},
            "num_requests": len(service.mailboxes),
            "index": {"ok": table.index_ok},
            "nodes": [_shown(node) for node in self._nodes],
            "other_models": [{"node_id": r.node_id, "model": r.model, "address": r.address} for r in table.strangers],
            "sessions": [
                {
                    "node_id": session.node.node_id,
                    "instance_id": session.node.instance_id,
                    "connected": session.is_connected,
                    "num_requests": session.num_requests,
                    "age_s": round(time.time() - session.started_at, 3),
                }
                for session in pool.sessions.values()
            ],
            "failing": sorted(pool.failing()),
            "breakers": pool.breakers.views(),
            "in_flight": service.ledger.in_flight,
        }

    def _watched(self) -> dict[str, Any]:
        """What `/cluster/live` has more: newest requests first."""
        recent, stats = self._service.recent, self._service.recent.stats()
        gateway = GatewayView(
            index_ok=self._service.table.index_ok,
            draining=self._service.draining,
            failing=frozenset(self._service.pool.failing()),
            strangers=self._service.table.strangers,
            left=self._left(),
            stats=stats,
        )
        return {
            "now": time.time(),
            "alerts": find_alerts(self._nodes, gateway),
            "stats": stats,
            "num_ended": recent.num_ended,
            "requests": list(islice(reversed(recent.requests), NUM_SHOWN)),
        }

    def _left(self) -> dict[str, float]:
        """Node id -> seconds since it was seen, of those that went without draining first."""
        now, here = self._clock(), {node.node_id for node in self._service.table.nodes}
        return {
            name: now - at
            for name, (at, state) in self._last_seen.items()
            if name not in here and state is not NodeState.DRAINING
        }


def _shown(node: NodeView) -> dict[str, Any]:
    return {field.name: getattr(node.record, field.name) for field in fields(node.record)} | {"live": node.live}
