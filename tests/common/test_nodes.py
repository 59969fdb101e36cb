"""Node records as they travel: between versions, too."""

from __future__ import annotations

import json

import pytest

from kvferry.common.nodes import BlockAccounts, LayoutCard, Link, NodeLoad, NodeRecord, NodeState, Role

CARD = LayoutCard("model", "numerics", "float32", 16, 2, 1, 8, "1")
RECORD = NodeRecord(
    node_id="n",
    instance_id="i",
    role=Role.DECODE,
    state=NodeState.READY,
    address="host:1",
    metrics_address="host:2",
    model="m",
    card=CARD,
    load=NodeLoad(num_running=3, accounts=BlockAccounts(free=5, cached=2)),
    max_model_len=100,
    links=(Link("other", "host:3", "shm", "first choice of both sides", 7, 8),),
)


def test_a_record_comes_back_as_it_was() -> None:
    assert NodeRecord.from_json(RECORD.to_json()) == RECORD


def test_what_a_newer_node_says_of_its_load_is_left_out() -> None:
    data = json.loads(RECORD.to_json())
    data["load"]["mood"] = 1.0
    assert NodeRecord.from_json(json.dumps(data)) == RECORD


def test_a_layout_with_something_unknown_is_refused() -> None:
    data = json.loads(RECORD.to_json())
    data["card"]["twist"] = 2
    with pytest.raises(ValueError, match="twist"):
        NodeRecord.from_json(json.dumps(data))
