"""What fail points did, for any process's /metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from kvferry.common.fail_points import FailPoints


class FaultCollector(Collector):
    """What fail points did; no samples while none is on."""

    def __init__(self, fail_points: FailPoints) -> None:
        self._fail_points = fail_points

    def describe(self) -> Iterator[CounterMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(
            "kvferry:fail_point_hits", "Faults injected for a test.", labels=["point", "action"]
        )
        for (point, action), count in list(self._fail_points.hits.items()):
            family.add_metric([point, action], count)
        yield family
