"""`kvferry explain` on files: what it prints, and what it says of lines that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.common.nodes import Role
from kvferry.services.gateway.decision import MARK, to_json
from kvferry.services.gateway.plan import RouteRequest
from kvferry.services.gateway.router import choose
from kvferry.services.local.cli import main
from tests.gateway.test_router import node


def logged(request_id: str, **changes: object) -> str:
    nodes = [node("d0", Role.DECODE, step_ms=15.0), node("d1", Role.DECODE, num_running=9), node("p0", Role.PREFILL)]
    plan = choose(RouteRequest(request_id, 1000), nodes, {"i-p0": 20})
    return f"12:00:00 I {MARK}{json.dumps(to_json(plan) | changes)}\n"


def test_the_table_names_candidates_terms_and_the_decision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.log"
    file.write_text("12:00:00 I gateway ready\n" + logged("r1") + logged("r2"))
    assert main(["explain", str(file), "--request", "r1"]) == 0
    said = capsys.readouterr().out
    assert "r1: 1000 prompt tokens, first token predicted in" in said
    assert "r2" not in said
    assert "chosen: decode d0, prefill p0 (the same again)" in said
    assert [line.split()[0] for line in said.splitlines()[2:]] == ["decode", "d0", "d1", "prefill", "p0"]
    assert "15.0" in said


def test_a_decision_that_does_not_follow_is_an_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.log"
    file.write_text(logged("r1", decode="i-d1"))
    assert main(["explain", str(file)]) == 1
    assert "NOT THE SAME AGAIN: decode d0" in capsys.readouterr().out


def test_nothing_to_explain_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gateway.log"
    file.write_text("12:00:00 I gateway ready\n")
    assert main(["explain", str(file)]) == 2
    assert "no routing decision in it" in capsys.readouterr().err
    assert main(["explain", "no-such-request", "--url", "http://127.0.0.1:1"]) == 2
    assert "does not answer" in capsys.readouterr().err
