"""One request's trace goes through all processes, with the phases of its hand-over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.cluster import cluster

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_one_trace_over_gateway_decode_and_prefill(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "spans"
    flags = ("--otlp-traces-endpoint", f"file:{path}")
    small = ("--max-num-batched-tokens", "64", *flags)
    with cluster(tmp_path, str(tiny_model)) as nodes:
        prefill = nodes.start_node("prefill", *small, wait=False)
        decode = nodes.start_node("decode", "--local-prefill-max-tokens", "16", *small, wait=False)
        for node in (prefill, decode):
            nodes.wait_node(node)
        gateway = nodes.start_gateway(*flags)
        body = {"model": "test", "prompt": list(range(3, 300)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {"traceparent": CALLER}
        reply = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
    spans: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert {span["trace_id"] for span in spans} == {CALLER.split("-")[1]}
    name_of = {span["span_id"]: span["name"] for span in spans}
    tree = {(span["service"], name_of.get(span["parent_id"], "caller"), span["name"]) for span in spans}
    assert tree == {
        ("kvferry-gateway", "caller", "request"),
        ("kvferry-gateway", "request", "route"),
        ("kvferry-decode", "request", "decode"),
        ("kvferry-decode", "decode", "queue"),
        ("kvferry-decode", "decode", "receive_blocks"),
        ("kvferry-decode", "receive_blocks", "pull"),
        ("kvferry-decode", "receive_blocks", "confirm"),
        ("kvferry-decode", "decode", "first_step"),
        ("kvferry-prefill", "receive_blocks", "prefill"),
        ("kvferry-prefill", "prefill", "queue"),
        ("kvferry-prefill", "prefill", "chunk"),
    }
    assert all(span["start_ns"] <= span["end_ns"] and span["error"] is None for span in spans)
    (request,) = [span for span in spans if span["name"] == "request"]
    assert all(request["start_ns"] <= span["start_ns"] for span in spans)
    assert request["attributes"]["gen_ai.usage.prompt_tokens"] == 297
    assert request["attributes"]["gen_ai.usage.completion_tokens"] == 4
    pulls = [span["attributes"] for span in spans if span["name"] == "pull"]
    assert sum(pull["blocks"] for pull in pulls) == 296 // 16
    assert {pull["transport"] for pull in pulls} == {"shm"}
    assert sum(span["name"] == "chunk" for span in spans) == 5
