"""`/cluster`: what this gateway knows of its cluster, as JSON, with every node asked how it is at this moment."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import grpc

from kvferry.common.nodes import NodeRecord
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.gateway.serving import Service
from kvferry.services.rpc.aio import Dial

STATS_TIMEOUT_S = 0.5


async def cluster_state(service: Service, model: str, version: str) -> dict[str, Any]:
    """Nodes are asked in parallel; one that does not answer in time shows its last record, `live` false."""
    table, pool = service.table, service.pool
    nodes = await asyncio.gather(*(_node_state(record, pool.dial) for record in table.nodes))
    return {
        "model": model,
        "version": version,
        "ready": bool(table.ready_decode) and not service.draining,
        "draining": service.draining,
        "max_model_len": table.max_model_len,
        "num_requests": len(service.mailboxes),
        "index": {"ok": table.index_ok},
        "nodes": nodes,
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
        "in_flight": {instance_id: asdict(count) for instance_id, count in service.ledger.in_flight.items()},
    }


async def _node_state(record: NodeRecord, dial: Dial) -> dict[str, Any]:
    live = await _ask(record, dial)
    return {**asdict(live or record), "live": live is not None}


async def _ask(record: NodeRecord, dial: Dial) -> NodeRecord | None:
    """The node's record of this moment. None when it does not answer, or another instance does."""
    try:
        async with dial(record.address) as channel:
            call = pb_grpc.NodeStub(channel).Stats(pb.StatsRequest(), timeout=STATS_TIMEOUT_S)
            live = NodeRecord.from_json((await call).record_json)
    except (grpc.RpcError, ValueError):
        return None
    return live if live.instance_id == record.instance_id else None
