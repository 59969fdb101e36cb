"""`kvferry top`: what it prints of a state, and of a real cluster."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.common.errors import Unavailable
from kvferry.services.local import top
from kvferry.services.local.access import Access
from tests.e2e.cluster import Gateway, cluster

LATENCIES = {"p50": 0.0123, "p95": 0.5, "p99": 2.0}


def node(node_id: str, role: str, *links: tuple[str, int], **changes: Any) -> dict[str, Any]:
    load = {
        "num_running": 3,
        "num_waiting": 2,
        "num_blocks": 48,
        "accounts": {"free": 10, "cached": 14, "sequence": 12, "lease": 8, "incoming": 4},
        "step_ms": 7.5,
    }
    pulls = [
        {"instance_id": to, "address": "host:1", "transport": "shm", "reason": "", "num_bytes": count}
        for to, count in links
    ]
    return {
        "node_id": node_id,
        "instance_id": f"i-{node_id}",
        "role": role,
        "state": "ready",
        "live": True,
        "load": load,
        "links": pulls,
    } | changes


def request(name: str, total_s: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {
        "request_id": name,
        "ended_at": 0.0,
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "output_tokens": 7,
        "decode": "d0",
        "prefill": "p0",
        "times": {"queue_s": 0.125, "prefill_s": 0.25, "transfer_s": 0.0, "first_step_s": 0.125},
        "first_token_s": 0.5,
        "total_s": total_s,
        "ended": "stop",
        "is_error": False,
    } | changes


def state(**changes: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "version": "1.2.3",
        "now": 100.0,
        "num_requests": 4,
        "stats": {
            "window_s": 300.0,
            "cached_tokens": 64,
            "prompt_tokens": 100,
            "tokens_per_s": 55.4,
            "first_token": LATENCIES,
            "inter_token": LATENCIES,
        },
        "alerts": [],
        "nodes": [node("d0", "decode", ("i-p0", 5_000_000)), node("p0", "prefill")],
        "requests": [request("second"), request("first", 0.5)],
    } | changes


def shown(now: dict[str, Any], before: dict[str, Any] | None = None) -> str:
    return "\n".join(top.render(now, lambda text, colour: text, before))


def test_everything_has_its_place() -> None:
    text = shown(state())
    for part in (
        "tiny 1.2.3",
        "in flight 4   waiting 4   output 55 tok/s   prefix hits 64 %   KV 50 % of 96 blocks",
        "p50 12.3 ms   p95  500 ms   p99     2 s",
        "all is well",
        "from p0 over shm: 5 MB",
        "p0 → d0        100 (64) → 7      1 s  stop",
    ):
        assert part in text
    assert text.index("\np0    prefill") < text.index("\nd0    decode") < text.index("second") < text.index("first  ")


def test_the_bars_are_shares() -> None:
    text = shown(state())
    assert "██████" + "████" + "██" + "▒▒▒▒▒▒▒" + "·····" in text  # 12, 8, 4, 14 and 10 of 48 in 24 places
    second, first = (line.rsplit(" ", 1)[-1] for line in text.splitlines()[-2:])
    assert (len(second), len(first)) == (24, 12)


def test_links_show_their_speed_once_there_is_a_before() -> None:
    before = state(now=98.0, nodes=[node("d0", "decode", ("i-p0", 1_000_000)), node("p0", "prefill")])
    assert "from p0 over shm: 2 MB/s" in shown(state(), before)
    restarted = state(now=98.0, nodes=[node("d0", "decode", ("i-p0", 9_000_000)), node("p0", "prefill")])
    assert "from p0 over shm: 0 B/s" in shown(state(), restarted)


def test_alerts_and_silent_nodes_are_said() -> None:
    alert = {"level": "critical", "title": "d0 is stalled", "detail": "Look at it."}
    text = shown(state(alerts=[alert], nodes=[node("d0", "decode", live=False)]))
    assert "CRITICAL d0 is stalled. Look at it." in text
    assert "all is well" not in text
    assert re.search(r"d0    decode   silent", text)


def test_an_empty_cluster_is_no_error() -> None:
    nothing = {"p50": None, "p95": None, "p99": None}
    stats = state()["stats"] | {"prompt_tokens": 0, "first_token": nothing, "inter_token": nothing}
    text = shown(state(nodes=[], requests=[], stats=stats))
    assert "no request has ended yet" in text
    assert "prefix hits –   KV – of 0 blocks" in text


def test_names_cannot_command_the_terminal() -> None:
    evil = "x\x1b]0;owned\x07\x1b[2J\r\n\u202e"
    alert = {"level": "notice", "title": evil, "detail": evil}
    now = state(
        model=evil,
        alerts=[alert],
        nodes=[node(evil, "decode", (f"i-{evil}", 1), ("gone", 1))],
        requests=[request(evil, decode=evil, prefill=evil, ended=evil)],
    )
    text = shown(now)
    assert not set(text) & set("\x1b\x07\r\u202e")
    assert "owned" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[httpx.Response]]:
    """What the gateway answers, one after the other; then somebody presses Ctrl-C."""
    left: list[httpx.Response] = []

    def handle(asked: httpx.Request) -> httpx.Response:
        assert asked.url.path == "/cluster/live"
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    client = httpx.Client
    monkeypatch.setattr(top.httpx, "Client", lambda **options: client(**options, transport=httpx.MockTransport(handle)))
    monkeypatch.setattr(top, "POLL_S", 0.0)
    yield left
    assert not left


def test_a_terminal_is_redrawn_until_ctrl_c_and_then_left_as_it_was(answers: list[httpx.Response]) -> None:
    answers += [
        httpx.Response(200, json=state()),
        httpx.Response(200, json=state(now=101.0, num_requests=5)),
        httpx.Response(503, text="draining"),
        httpx.Response(200, json=state(now=103.0, num_requests=6)),
    ]
    out = Terminal()
    assert top.main(Access("http://gateway"), out=out) == 0
    written = out.getvalue()
    assert written.startswith("\x1b[?1049h")
    assert written.endswith("\x1b[?1049l")
    screens = written.split("\x1b[H")[1:]
    assert [re.findall(r"in flight (\d)", screen)[0] for screen in screens] == ["4", "5", "5", "6"]
    assert ["no gateway answers" in screen for screen in screens] == [False, False, True, False]


def test_a_pipe_gets_the_present_state_once_and_without_colours(answers: list[httpx.Response]) -> None:
    answers.append(httpx.Response(200, json=state()))
    out = io.StringIO()
    assert top.main(Access("http://gateway"), out=out) == 0
    assert out.getvalue() == shown(state()) + "\n"


def test_without_a_gateway_it_says_so(answers: list[httpx.Response]) -> None:
    answers.append(httpx.Response(404, text="not here"))
    with pytest.raises(Unavailable, match="no gateway answers at http://gateway"):
        top.main(Access("http://gateway"), once=True)


def _complete(gateway: Gateway, request_id: str, prompt: list[int]) -> None:
    body = json.dumps({"model": "test", "prompt": prompt, "max_tokens": 5, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json", "x-request-id": request_id}
    with urllib.request.urlopen(
        urllib.request.Request(gateway.url + "/v1/completions", body, headers), timeout=60
    ) as reply:
        assert reply.status == 200


def test_a_real_cluster_is_shown_with_its_ferry_and_its_requests(tmp_path: Path, tiny_model: Path) -> None:
    with cluster(tmp_path, str(tiny_model)) as nodes:
        nodes.start_node("prefill", "--node-id", "pre")
        nodes.start_node("decode", "--node-id", "dec", "--local-prefill-max-tokens", "16")
        gateway = nodes.start_gateway()
        prompt = [7 + i % 300 for i in range(200)]
        _complete(gateway, "ferried", prompt)
        _complete(gateway, "cached", prompt)
        command = [sys.executable, "-m", "kvferry.services.local.cli", "top", "--once", "--url", gateway.url]
        for _ in range(20):  # what nodes have moved comes with their heartbeats
            ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
            if "over shm" in ran.stdout:
                break
    print(ran.stdout)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "all is well" in ran.stdout
    assert re.search(r"^pre   prefill  ready", ran.stdout, re.MULTILINE)
    assert re.search(r"^dec   decode   ready", ran.stdout, re.MULTILINE)
    blocks = 200 // 16
    (moved,) = re.findall(r"from pre over shm: (.*)", ran.stdout)
    assert moved == top._bytes(blocks * 2 * 2 * 2 * 16 * 16 * 4)  # layers, k and v, kv-heads, slots, head_dim, float32
    cached, ferried = ran.stdout.splitlines()[-2:]
    assert re.search(r"ferried +pre → dec +200 → 5 ", ferried)
    assert re.search(rf"cached +dec +200 \({blocks * 16}\) → 5 ", cached)
