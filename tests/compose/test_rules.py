"""The alerts: valid, each shown to fire, each on metrics that exist, each with a paragraph for who is woken."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvferry.common.nodes import BlockAccounts, NodeLoad
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.node.metrics import NodeMetrics

ROOT = Path(__file__).parents[2]
RULES = ROOT / "compose/prometheus/rules/kvferry.yml"
TESTS = Path(__file__).with_name("rules_test.yml")


def rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def test_promtool_sees_every_alert_fire() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(TESTS)]):
        made = subprocess.run([promtool, *command], capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stdout + made.stderr
    cases = [case for test in yaml.safe_load(TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    for fires in (True, False):
        shown = {case["alertname"] for case in cases if bool(case["exp_alerts"]) is fires}
        assert shown == set(alerts()), f"alerts that are never shown {'firing' if fires else 'silent'}"


def test_alerts_read_metrics_that_exist() -> None:
    accounts = BlockAccounts(free=1, cached=0, sequence=0, lease=0, incoming=0)
    registries = (
        NodeMetrics(lambda: NodeLoad(num_blocks=1, accounts=accounts)).registry,
        GatewayMetrics(CollectorRegistry()).registry,
    )
    families = {family.name for registry in registries for family in registry.collect()}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        for name in set(re.findall(r"kvferry:[a-z_]+(?::\w+)?", rule["expr"])):
            family = re.sub(r"_(bucket|count|sum|total)$", "", name)
            assert name in recorded or family in families or name in families, f"{name}: no such metric"


def test_each_alert_leads_to_its_paragraph() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alerts())
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")
