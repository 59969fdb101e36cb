"""What is wrong with the cluster at this moment, worst first, in words for whoever looks. Pure: of what it is given."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.common.nodes import NodeRecord, NodeState, Role
from kvferry.services.gateway.misfits import find_misfits
from kvferry.services.gateway.recent import WindowStats

KV_NEARLY_FULL = 0.95
MAX_ERROR_SHARE = 0.05


class Level(enum.StrEnum):
    CRITICAL = "critical"  # requests fail, or something that must never happen has
    WARNING = "warning"  # requests are slower than they should be, or soon will be
    NOTICE = "notice"


@dataclass(frozen=True, slots=True)
class Alert:
    level: Level
    title: str
    detail: str


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's record: its own of this moment, or with `live` false the last one it announced."""

    record: NodeRecord
    live: bool


@dataclass(frozen=True, slots=True)
class GatewayView:
    """What the gateway itself knows. `failing`: instances; `left`: node ids, and how many seconds ago they went."""

    index_ok: bool
    draining: bool
    failing: frozenset[str]
    strangers: Sequence[NodeRecord]
    left: Mapping[str, float]
    stats: WindowStats


def find_alerts(nodes: Sequence[NodeView], gateway: GatewayView) -> list[Alert]:
    found = [*_of_cluster(nodes, gateway), *(alert for node in nodes for alert in _of_node(node, gateway.failing))]
    return sorted(found, key=lambda alert: list(Level).index(alert.level))


def _of_cluster(nodes: Sequence[NodeView], gateway: GatewayView) -> Iterator[Alert]:
    serving = [node for node in nodes if node.record.role is not Role.PREFILL]
    if not any(node.live and node.record.state is NodeState.READY for node in serving):
        why = f"{len(serving)} known, none of them ready" if serving else "none is known"
        yield Alert(Level.CRITICAL, "No decode node is ready", f"{why}: every request waits or is refused.")
    if not gateway.index_ok:
        yield Alert(
            Level.WARNING,
            "The index is unreachable",
            "Requests go on with the last known nodes, routed by load alone. Check Redis.",
        )
    if gateway.draining:
        yield Alert(Level.NOTICE, "This gateway is draining", "It takes no new requests and ends with its last one.")
    stats = gateway.stats
    if stats.num_errors > MAX_ERROR_SHARE * stats.num_requests:
        title = f"{stats.num_errors} of {stats.num_requests} requests ended in an error"
        yield Alert(Level.WARNING, title, f"In the last {stats.window_s / 60:g} minutes; the list below says which.")
    for record in gateway.strangers:
        detail = f"It serves {record.model!r}: nothing is sent to it. Give each model a namespace of its own."
        yield Alert(Level.WARNING, f"{record.node_id} serves another model", detail)
    for misfit in find_misfits(node.record for node in nodes):
        yield Alert(Level.WARNING, misfit.title, misfit.detail)
    for node_id, seconds in gateway.left.items():
        detail = f"{seconds:.0f} s ago. Expected after it was stopped; otherwise its log says why."
        yield Alert(Level.NOTICE, f"{node_id} has left", detail)


def _of_node(node: NodeView, failing: Iterable[str]) -> Iterator[Alert]:
    record, name = node.record, node.record.node_id
    if not node.live:
        detail = f"{record.address} did not answer; what is shown of it is its last report."
        yield Alert(Level.WARNING, f"{name} is silent", detail)
    elif record.instance_id in failing:
        yield Alert(Level.WARNING, f"{name} has just failed", "Requests go elsewhere for a moment.")
    if record.state is NodeState.STALLED:
        detail = "One engine step has run for too long. New requests avoid it; it is restarted if it does not recover."
        yield Alert(Level.CRITICAL, f"{name} is stalled", detail)
    elif record.state is NodeState.DRAINING:
        yield Alert(Level.NOTICE, f"{name} is draining", "It finishes what it has and takes nothing new.")
    elif record.state is NodeState.LOADING:
        yield Alert(Level.NOTICE, f"{name} is loading", "It will serve once its model is in memory.")
    yield from _of_memory(record)
    for link in record.links:
        if "failed: " in link.reason:
            yield Alert(
                Level.WARNING, f"{name} pulls over {link.transport} only", f"From {link.address}: {link.reason}"
            )


def _of_memory(record: NodeRecord) -> Iterator[Alert]:
    accounts, num_blocks = record.load.accounts, record.load.num_blocks
    if accounts.total != num_blocks:
        parts = ", ".join(
            f"{name} {getattr(accounts, name)}" for name in ("free", "cached", "sequence", "lease", "incoming")
        )
        detail = f"{parts}: {accounts.total} in all, the pool has {num_blocks}. Drain the node and report this."
        yield Alert(Level.CRITICAL, f"The block accounts of {record.node_id} do not sum up", detail)
    if num_blocks and (use := 1 - accounts.available / num_blocks) >= KV_NEARLY_FULL:
        detail = f"{accounts.available} of {num_blocks} blocks are left: requests queue or are preempted."
        yield Alert(Level.WARNING, f"KV memory of {record.node_id} is {use:.0%} full", detail)
