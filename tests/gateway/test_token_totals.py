"""Tokens that are counted first and shown later are shown as if each had been observed."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from kvferry.services.gateway.token_totals import CountedHistogram, TokenTotals

BOUNDS = (0.001, 0.01, 0.1, 1.0)


def samples(registry: CollectorRegistry, name: str) -> dict[str, float]:
    found = [sample for family in registry.collect() for sample in family.samples if sample.name.startswith(name)]
    return {f"{sample.name}{sample.labels}": sample.value for sample in found if not sample.name.endswith("_created")}


def test_they_show_what_observing_each_would_have_shown() -> None:
    ours, plain = CollectorRegistry(), CollectorRegistry()
    totals = TokenTotals(
        Counter("tokens", "t", registry=None), CountedHistogram("gap", "g", buckets=BOUNDS, registry=None)
    )
    ours.register(totals)
    tokens, gaps = Counter("tokens", "t", registry=plain), Histogram("gap", "g", buckets=BOUNDS, registry=plain)
    draw = random.Random(3)
    for number in range(400):
        num_tokens = draw.randrange(3)
        gap_s = None if number % 10 == 0 else draw.choice((*BOUNDS, draw.lognormvariate(-4, 2), 5.0))
        totals.note(num_tokens, gap_s)
        tokens.inc(num_tokens)
        if gap_s is not None:
            gaps.observe(gap_s)
        if number % 100 == 50:
            totals.flush()
        if number % 100 == 99:
            assert samples(ours, "tokens") == samples(plain, "tokens")
            expected = samples(plain, "gap")
            assert samples(ours, "gap") == pytest.approx(expected)
            assert samples(ours, "gap") == pytest.approx(expected), "collecting again adds nothing"


def test_no_other_metric_may_have_their_names() -> None:
    registry = CollectorRegistry()
    registry.register(
        TokenTotals(Counter("tokens", "t", registry=None), CountedHistogram("gap", "g", buckets=BOUNDS, registry=None))
    )
    with pytest.raises(ValueError, match="Duplicated"):
        Counter("tokens", "t", registry=registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("gap", "g", registry=registry)
