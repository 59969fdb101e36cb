"""Prefill nodes that the router passes over because their blocks mean nothing to decode nodes are named, with why."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from kvferry.common.nodes import NodeRecord, Role
from kvferry.services.gateway.alerts import NodeView, find_alerts
from kvferry.services.gateway.misfits import find_misfits
from kvferry.services.gateway.nodes import MIN_REFRESH_S, NodeTable
from kvferry.services.gateway.plan import RouteRequest
from kvferry.services.gateway.router import choose
from kvferry.services.index.memory import MemoryIndex
from tests.gateway.test_alerts import DECODE, GATEWAY, PREFILL


def other(record: NodeRecord, node_id: str, **card: Any) -> NodeRecord:
    return replace(record, node_id=node_id, instance_id=f"i-{node_id}", card=replace(record.card, **card))


@pytest.mark.parametrize(
    ("card", "why"),
    [
        ({"block_size": 32}, "p1 has block_size 32, this node has 16: start both with the same value"),
        ({"dtype": "bfloat16"}, "p1 has kv_cache_dtype 'bfloat16', this node has 'float32': start both with"),
        ({"model_fingerprint": "new"}, "p1 has model_fingerprint 'new', this node has 'fake-model': start both with"),
        ({"numerics_id": "gpu"}, "p1 has numerics_id 'gpu', this node has 'fake-numerics': start both with"),
        ({"tp_size": 2}, "p1 holds 1 of the 2 kv-heads that this node needs"),
    ],
)
def test_a_pair_that_cannot_share_blocks_is_an_alert_that_names_both_values(card: dict[str, Any], why: str) -> None:
    misfit = other(PREFILL, "p1", **card)
    assert choose(RouteRequest("r", 400), [DECODE, misfit], {}).prefill == ()
    nodes = [NodeView(node, live=True) for node in (DECODE, PREFILL, misfit)]
    (alert,) = find_alerts(nodes, GATEWAY)
    assert (alert.level.value, alert.title) == ("warning", "p1 can give no blocks to d0")
    assert alert.detail.startswith(f"d0 would refuse them: {why}")


def test_nodes_of_one_layout_are_told_of_together() -> None:
    prefill = [other(PREFILL, f"p{i}", block_size=32) for i in range(3)]
    decode = [other(DECODE, f"d{i}") for i in range(2)]
    alone = other(replace(DECODE, role=Role.BOTH), "both", block_size=64)
    (misfit,) = find_misfits([*prefill, *decode, alone])
    assert misfit.title == "p0 and 2 others can give no blocks to d0 and 1 other"


def test_nodes_of_one_layout_and_another_version_share_blocks() -> None:
    assert find_misfits([DECODE, other(PREFILL, "p1", version="9")]) == []


def test_a_pair_that_cannot_share_is_logged_once_and_again_when_it_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> list[int]:
        now, index = 0.0, MemoryIndex()
        table = NodeTable(index, "tiny", lambda: now)
        misfit = other(PREFILL, "p1", block_size=32)
        counts = []
        for records in ((DECODE, misfit), (DECODE, misfit), (DECODE,), (DECODE, misfit)):
            await index.withdraw(misfit.instance_id)
            for record in records:
                await index.announce(record, 1e6)
            now += 10.0 + MIN_REFRESH_S
            await table.refresh()
            lines = [record.message for record in caplog.records if "no blocks" in record.message]
            counts.append(len(lines))
        assert set(lines) == {
            "p1 can give no blocks to d0: d0 would refuse them: p1 has block_size 32, this node has 16: "
            "start both with the same value."
        }
        return counts

    with caplog.at_level(logging.WARNING, "kvferry.gateway"):
        assert asyncio.run(scenario()) == [1, 1, 1, 2]
