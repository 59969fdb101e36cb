"""What a scrape shows of a node's load: each figure is that of the report, whatever it is."""

from __future__ import annotations

import pytest

from kvferry.common.nodes import BlockAccounts, NodeLoad
from kvferry.services.node.metrics import NodeMetrics

ACCOUNTS = BlockAccounts(free=4, cached=6, sequence=20, lease=7, incoming=13)
LOAD = NodeLoad(
    num_running=3,
    num_waiting=5,
    num_waiting_tokens=1234,
    num_blocks=50,
    accounts=ACCOUNTS,
    num_leases=11,
    num_shared_blocks=9,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_requests_running", 3),
        ("num_requests_waiting", 5),
        ("num_tokens_waiting", 1234),
        ("kv_cache_usage_perc", 0.8),
        ("kv_blocks_total", 50),
        ("kv_blocks_accounted", 50),
        ("kv_blocks_shared", 9),
        ("leases_open", 11),
    ],
)
def test_a_gauge_shows_what_the_load_says_now(name: str, value: float) -> None:
    load = NodeLoad(num_blocks=1)
    metrics = NodeMetrics(lambda: load)
    assert metrics.registry.get_sample_value(f"kvferry:{name}") is not None
    load = LOAD
    assert metrics.registry.get_sample_value(f"kvferry:{name}") == pytest.approx(value)


def test_each_account_has_its_own_blocks() -> None:
    metrics = NodeMetrics(lambda: LOAD)
    for account in ("free", "cached", "sequence", "lease", "incoming"):
        shown = metrics.registry.get_sample_value("kvferry:kv_blocks", {"account": account})
        assert shown == getattr(ACCOUNTS, account)
