"""One request's trace and log lines go through all processes, with the phases of its hand-over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import Gateway, Node, Process, cluster

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_one_trace_over_gateway_decode_and_prefill(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "spans"
    flags = ("--otlp-traces-endpoint", f"file:{path}", "--log-format", "json")
    small = ("--max-num-batched-tokens", "64", *flags)
    with cluster(tmp_path, str(tiny_model)) as nodes:
        prefill = nodes.start_node("prefill", *small, wait=False)
        decode = nodes.start_node("decode", "--local-prefill-max-tokens", "16", *small, wait=False)
        for node in (prefill, decode):
            nodes.wait_node(node)
        gateway = nodes.start_gateway(*flags)
        body = {"model": "test", "prompt": list(range(3, 300)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        headers = {"traceparent": CALLER, "x-request-id": "the-one"}
        reply = httpx.post(f"{gateway.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert reply.status_code == 200, reply.text
        check_metrics(gateway, decode, prefill)
    check_logs((gateway, decode, prefill))
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


def check_logs(processes: tuple[Process, Process, Process]) -> None:
    """Every line is JSON, and those of the request carry its id and trace, on all three kinds of process."""
    gateway, decode, prefill = (
        [json.loads(line) for line in process.log.read_text().splitlines()] for process in processes
    )
    ours = {"request_id": "the-one", "trace_id": CALLER.split("-")[1]}
    (access,) = [line for line in gateway if line.get("path") == "/v1/completions"]
    (decoded,) = [line for line in decode if "ended" in line]
    (prefilled,) = [line for line in prefill if "ended" in line]
    for line in (access, decoded, prefilled):
        assert {name: line.get(name) for name in ours} == ours, line
    assert access["prompt_tokens"] == decoded["prompt_tokens"] == 297
    assert access["generation_tokens"] == decoded["generation_tokens"] == 4
    assert decoded["received_tokens"] == prefilled["computed_tokens"] == prefilled["prompt_tokens"] == 288
    assert decoded["computed_tokens"] == 297 - 288
    assert decoded["prompt_id"] == prefilled["prompt_id"] != "the-one"
    apart = [line for line in gateway if line["message"].startswith("session with")]
    assert apart, "the session was opened by the request, and belongs to none"
    assert not any("request_id" in line for line in apart)


def check_metrics(gateway: Gateway, decode: Node, prefill: Node) -> None:
    """Each process tells of its part, and the parts make up the request."""

    def by_source(process: Gateway | Node) -> list[float]:
        sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
        return [process.metric("kvferry:prompt_tokens_by_source_total", source=source) for source in sources]

    def value(process: Gateway | Node, name: str) -> float:
        return process.metric(f"kvferry:{name}")

    assert by_source(gateway) == by_source(decode) == [297 - 288, 0, 288]
    assert by_source(prefill) == [288, 0, 0]
    assert value(gateway, "prompt_tokens_total") == value(gateway, "request_prefill_kv_computed_tokens_sum") == 297
    assert [value(n, "prefix_cache_queries_total") for n in (decode, prefill)] == [297, 288]
    assert [value(n, "prefix_cache_hits_total") for n in (decode, prefill)] == [0, 0]
    assert value(decode, "external_prefix_cache_queries_total") == 297
    assert value(decode, "external_prefix_cache_hits_total") == 288
    assert value(gateway, "generation_tokens_total") == value(decode, "generation_tokens_total") == 4
    assert decode.metric("kvferry:cache_config_info", block_size="16", cache_dtype="float32") == 1
    parts = ("queue_time", "prefill_time", "transfer_time", "first_step_time")
    first_s = sum(value(gateway, f"request_{part}_seconds_sum") for part in parts)
    decode_s = value(gateway, "request_decode_time_seconds_sum")
    queue_s = value(gateway, "request_queue_time_seconds_sum")
    assert 0 < first_s <= value(gateway, "time_to_first_token_seconds_sum")
    assert value(gateway, "request_inference_time_seconds_sum") + queue_s == pytest.approx(first_s + decode_s)
    whole_s = value(gateway, "e2e_request_latency_seconds_sum")
    assert value(gateway, "time_to_first_token_seconds_sum") + decode_s <= whole_s
