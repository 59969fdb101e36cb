"""Every query of every board, asked of a real Prometheus that scrapes a running cluster, returns data."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.services.gateway.api_keys import new_key
from tests.e2e.cluster import Cluster, Gateway, Node, Process, cluster, free_port

BOARDS = Path(__file__).parents[2] / "compose/grafana/dashboards"
SCRAPE_S, TRAFFIC_S = 1, 20


def queries() -> Iterator[tuple[str, str]]:
    """(board and panel, PromQL with its variables filled in)."""
    for path in sorted(BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$__rate_interval", "10s").replace("$node", ".*")
                yield f"{path.stem}: {panel['title']}", query


def start_prometheus(nodes: Cluster, targets: dict[str, list[str]]) -> str:
    """Its URL."""
    port = free_port()
    jobs = [{"job_name": job, "static_configs": [{"targets": found}]} for job, found in targets.items()]
    config = nodes.folder / "prometheus.yml"
    config.write_text(json.dumps({"global": {"scrape_interval": f"{SCRAPE_S}s"}, "scrape_configs": jobs}))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={nodes.folder / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = Process("prometheus", command, nodes.folder / "prometheus.log")
    with process.log.open("ab") as out:
        process.popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    nodes.processes.append(process)
    return f"http://127.0.0.1:{port}"


def traffic(gateway: Gateway, prefill: Node, headers: dict[str, str]) -> None:
    """Long and short prompts, shared and not, of several samples; at the end without a prefill node."""
    rng = random.Random(0)
    stem = rng.choices(range(3, 500), k=200)
    started = time.monotonic()
    while (passed := time.monotonic() - started) < TRAFFIC_S:
        if passed > TRAFFIC_S / 2 and prefill.popen is not None and prefill.popen.poll() is None:
            prefill.stop(signal.SIGKILL)
        prompt = stem + rng.choices(range(3, 500), k=rng.randrange(20, 100))
        body = {"model": "test", "prompt": prompt, "max_tokens": 20, "n": 2, "temperature": 1, "ignore_eos": True}
        url = f"{gateway.url}/v1/completions"
        assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
        with httpx.stream("POST", url, json=body | {"stream": True, "max_tokens": 400}, headers=headers):
            pass  # leaves at once


def ask(url: str, query: str) -> list[Any]:
    reply = httpx.get(f"{url}/api/v1/query_range", params={
        "query": query, "start": time.time() - TRAFFIC_S, "end": time.time(), "step": 1
    }, timeout=30)  # fmt: skip
    assert reply.status_code == 200, f"{query}: {reply.text}"
    found: list[Any] = reply.json()["data"]["result"]
    return found


def test_every_panel_has_data(tiny_model: Path, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    with cluster(tmp_path, str(tiny_model)) as nodes:
        prefill = nodes.start_node("prefill", wait=False)
        decode = nodes.start_node("decode", "--local-prefill-max-tokens", "16", wait=False)
        for node in (prefill, decode):
            nodes.wait_node(node)
        key, line = new_key("alice")
        gateway = nodes.start_gateway("--api-keys", line)
        url = start_prometheus(
            nodes,
            {
                "gateway": [f"127.0.0.1:{gateway.port}"],
                "prefill": [prefill.record().metrics_address],
                "decode": [decode.record().metrics_address],
            },
        )
        traffic(gateway, prefill, {"authorization": f"Bearer {key}"})
        down = [series["metric"] for series in ask(url, "up") if series["values"][-1][1] != "1"]
        assert [target["job"] for target in down] == ["prefill"], down
        empty = [f"{panel}: {query}" for panel, query in queries() if not ask(url, query)]
        assert not empty, "\n".join(empty)
        values = [v for _, query in queries() for series in ask(url, query) for _, v in series["values"]]
        assert any(float(value) > 0 for value in values)
