"""What is called wrong, and how badly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvferry.common.nodes import BlockAccounts, Link, NodeLoad, NodeRecord, NodeState, Role
from kvferry.services.gateway.alerts import GatewayView, NodeView, find_alerts
from kvferry.services.gateway.recent import Recent
from tests.gateway.fake_decode import CARD

HEALTHY = NodeLoad(num_blocks=100, accounts=BlockAccounts(free=50, cached=30, sequence=10, lease=6, incoming=4))
DECODE = NodeRecord("i-d0", "d0", Role.DECODE, "host:1", "tiny", CARD, 512, load=HEALTHY)
PREFILL = replace(DECODE, instance_id="i-p0", node_id="p0", role=Role.PREFILL)
GATEWAY = GatewayView(True, False, frozenset(), (), {}, Recent().stats())


def found(*nodes: NodeRecord, silent: tuple[str, ...] = (), **changes: Any) -> list[tuple[str, str]]:
    views = [NodeView(node, live=node.node_id not in silent) for node in nodes]
    return [(alert.level.value, alert.title) for alert in find_alerts(views, replace(GATEWAY, **changes))]


def with_accounts(*accounts: int) -> NodeRecord:
    return replace(DECODE, load=replace(HEALTHY, accounts=BlockAccounts(*accounts)))


def test_a_healthy_cluster_has_none() -> None:
    link = Link("i-p0", "host:2", "grpc", "shm: not offered by the peer")
    assert found(replace(DECODE, links=(link,)), PREFILL, with_accounts(6, 0, 94, 0, 0)) == []


@pytest.mark.parametrize(
    ("node", "alert"),
    [
        (replace(DECODE, state=NodeState.STALLED), ("critical", "d0 is stalled")),
        (replace(DECODE, state=NodeState.DRAINING), ("notice", "d0 is draining")),
        (replace(DECODE, state=NodeState.LOADING), ("notice", "d0 is loading")),
        (with_accounts(50, 30, 10, 6, 3), ("critical", "The block accounts of d0 do not sum up")),
        (with_accounts(50, 30, 10, 6, 5), ("critical", "The block accounts of d0 do not sum up")),
        (with_accounts(1, 4, 95, 0, 0), ("warning", "KV memory of d0 is 95% full")),
        (
            replace(DECODE, links=(Link("i-p0", "host:2", "grpc", "shm: failed: gone"),)),
            ("warning", "d0 pulls over grpc only"),
        ),
    ],
)
def test_what_a_node_says_of_itself(node: NodeRecord, alert: tuple[str, str]) -> None:
    other = replace(DECODE, instance_id="i-d1", node_id="d1")
    assert found(node, other) == [alert]


@pytest.mark.parametrize(
    ("changes", "alert"),
    [
        ({"index_ok": False}, ("warning", "The index is unreachable")),
        ({"draining": True}, ("notice", "This gateway is draining")),
        ({"failing": frozenset({"i-d0"})}, ("warning", "d0 has just failed")),
        ({"silent": ("p0",)}, ("warning", "p0 is silent")),
        ({"left": {"d9": 12.4}}, ("notice", "d9 has left")),
        ({"strangers": (replace(DECODE, node_id="x"),)}, ("warning", "x serves another model")),
        (
            {"stats": replace(GATEWAY.stats, num_requests=100, num_errors=6)},
            ("warning", "6 of 100 requests ended in an error"),
        ),
    ],
)
def test_what_the_gateway_sees(changes: dict[str, Any], alert: tuple[str, str]) -> None:
    assert found(DECODE, PREFILL, **changes) == [alert]


def test_a_few_errors_among_many_requests_are_none() -> None:
    assert found(DECODE, stats=replace(GATEWAY.stats, num_requests=100, num_errors=5)) == []


@pytest.mark.parametrize("nodes", [(), (PREFILL,), (replace(DECODE, state=NodeState.LOADING),)])
def test_without_a_decode_node_nothing_can_be_served(nodes: tuple[NodeRecord, ...]) -> None:
    assert found(*nodes)[0] == ("critical", "No decode node is ready")


def test_a_silent_decode_node_serves_nothing() -> None:
    assert found(DECODE, silent=("d0",)) == [("critical", "No decode node is ready"), ("warning", "d0 is silent")]


def test_the_worst_comes_first() -> None:
    draining = replace(DECODE, state=NodeState.DRAINING)
    levels = [level for level, _ in found(draining, with_accounts(50, 0, 0, 0, 1), index_ok=False)]
    assert levels == ["critical", "warning", "notice"]
