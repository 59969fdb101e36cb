"""Histograms reach as far as what they measure may last: a p99 in the last bucket tells nothing."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from prometheus_client.metrics_core import Metric

from docs.generate import registries
from kvferry.common.config import Config

CONFIG = Config()
LONGEST_S = {
    "kvferry:engine_step_seconds": CONFIG.node.stall_timeout,
    "kvferry:transfer_seconds": CONFIG.node.peer_timeout_s,
    "kvferry:cancel_to_free_seconds": CONFIG.node.stall_timeout,
    "kvferry:engine_queue_time_seconds": CONFIG.gateway.queue_timeout,
    "kvferry:inter_token_latency_seconds": CONFIG.gateway.queue_timeout,
    "kvferry:request_time_per_output_token_seconds": CONFIG.gateway.queue_timeout,
    "kvferry:request_prefill_time_seconds": CONFIG.node.prefill_timeout_s,
}
"""Where nothing is said: an answer of ten minutes."""
FAMILIES = [family for registry in registries().values() for family in registry.collect() if family.type == "histogram"]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name.endswith("_seconds")], ids=lambda f: f.name)
def test_the_last_bucket_is_beyond_what_may_happen(family: Metric) -> None:
    bounds = sorted({float(s.labels["le"]) for s in family.samples if s.name.endswith("_bucket")})
    assert bounds[-1] == math.inf
    assert bounds[-2] >= LONGEST_S.get(family.name, 600.0)
    for sign in (-1, 1):
        sizes = sorted(sign * b for b in bounds[:-1] if sign * b > 0)
        assert all(b <= 3 * a for a, b in pairwise(sizes)), "no bucket spans more than 3 times"


def test_all_of_them_are_looked_at() -> None:
    assert set(LONGEST_S) <= {family.name for family in FAMILIES}
