"""Writes the files that are made from others: `make generated`. A test says when they are out of date."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from compose.grafana import boards
from kvferry.common.nodes import BlockAccounts, NodeLoad
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.node.metrics import NodeMetrics

ROOT = Path(__file__).parents[1]
RULES = ROOT / "compose/prometheus/rules/kvferry.yml"


def registries() -> dict[str, CollectorRegistry]:
    """What each kind of process shows under /metrics, with nothing counted yet."""
    load = NodeLoad(num_blocks=1, accounts=BlockAccounts(free=1))
    return {
        "Gateway": GatewayMetrics(CollectorRegistry()).registry,
        "Node": NodeMetrics(lambda: load).registry,
    }


def metrics_page() -> str:
    text = (
        "# Metrics\n\nGenerated from the code: `make generated`. Names follow vLLM's where the meaning is the same.\n"
    )
    for who, registry in registries().items():
        text += f"\n## {who}\n\n| name | type | labels | what it says |\n|---|---|---|---|\n"
        text += "".join(sorted(_row(family, registry) for family in registry.collect()))
    return text


def _row(family: Metric, registry: CollectorRegistry) -> str:
    name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
    return f"| `{name}` | {family.type} | {', '.join(_labels(family, registry))} | {family.documentation} |\n"


def _labels(family: Metric, registry: CollectorRegistry) -> Iterable[str]:
    own = getattr(registry._names_to_collectors.get(family.name), "_labelnames", ())
    found = {label for sample in family.samples for label in sample.labels} | set(own)
    return sorted(f"`{label}`" for label in found - {"le"})


def prometheus_rule() -> str:
    """Our alerts as the Prometheus operator takes them."""
    made: dict[str, Any] = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "kvferry"},
        "spec": yaml.safe_load(RULES.read_text()),
    }
    head = "# Generated from compose/prometheus/rules/kvferry.yml by `make generated`.\n"
    return head + yaml.safe_dump(made, sort_keys=False, width=1000)


def files() -> dict[Path, str]:
    made = {boards.FOLDER / f"{name}.json": boards.board(name) for name in boards.BOARDS}
    made[ROOT / "docs/metrics.md"] = metrics_page()
    made[ROOT / "k8s/components/monitoring/rules.yaml"] = prometheus_rule()
    return made


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
