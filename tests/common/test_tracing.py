"""Spans that cross a process, and the same calls without tracing."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.errors import ConfigError
from kvferry.common.tracing import Tracing, open_tracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans(path: Path) -> dict[str, Any]:
    return {span["name"]: span for span in map(json.loads, path.read_text().splitlines())}


def test_one_trace_over_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    gateway, node = (open_tracing(f"file:{path}", name) for name in ("gateway", "decode"))
    request = gateway.start("request", CALLER, gen_ai__request__id="cmpl-1")
    with request, node.start("decode", request.traceparent) as decode:
        now = time.monotonic()
        decode.phase("queue", now - 2.0, now - 0.5, blocks=3)
    for tracing in (gateway, node):
        tracing.flush()
    found = spans(path)
    assert {span["trace_id"] for span in found.values()} == {CALLER.split("-")[1]}
    assert found["request"]["parent_id"] == CALLER.split("-")[2]
    assert found["decode"]["parent_id"] == found["request"]["span_id"]
    assert found["queue"]["parent_id"] == found["decode"]["span_id"]
    assert (found["request"]["service"], found["decode"]["service"]) == ("gateway", "decode")
    assert found["request"]["attributes"] == {"gen_ai.request.id": "cmpl-1"}
    assert found["queue"]["attributes"] == {"blocks": 3}
    assert found["queue"]["end_ns"] - found["queue"]["start_ns"] == pytest.approx(1.5e9, rel=1e-3)
    assert found["decode"]["start_ns"] - found["queue"]["start_ns"] == pytest.approx(2e9, abs=1e8)


def test_an_exception_is_the_spans_status(tmp_path: Path) -> None:
    tracing = open_tracing(f"file:{tmp_path / 'spans'}", "gateway")
    with pytest.raises(ValueError, match="no block"), tracing.start("request"):
        raise ValueError("no block")
    tracing.flush()
    assert spans(tmp_path / "spans")["request"]["error"] == "no block"


def test_without_tracing_the_callers_trace_is_passed_on() -> None:
    for off in (Tracing(), open_tracing(None, "gateway")):
        assert not off.is_on
        with off.start("request", CALLER, a=1) as request:
            assert request.traceparent == CALLER
            assert request.child("decode").traceparent == CALLER
            request.set(b=2)
            request.phase("queue", 0.0, 1.0)


def test_nonsense_begins_a_trace_of_its_own(tmp_path: Path) -> None:
    tracing = open_tracing(f"file:{tmp_path / 'spans'}", "gateway")
    with tracing.start("request", "00-zz-zz-01"):
        pass
    tracing.flush()
    assert spans(tmp_path / "spans")["request"]["parent_id"] is None


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x", "file:/nowhere/at/all"])
def test_an_endpoint_that_cannot_be_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=endpoint):
        open_tracing(endpoint, "gateway")
