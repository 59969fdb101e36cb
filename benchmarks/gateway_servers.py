"""Who may stand between the fake node and the clients of `benchmarks.gateway`: our gateway, or another router."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

PYTHON = sys.executable


@dataclass(frozen=True)
class Server:
    """`source`: another checkout's `src`. `peer`: the command of a router that speaks HTTP to its node, without ports;
    empty for our gateway."""

    name: str
    source: str = ""
    peer: tuple[str, ...] = ()

    @property
    def ready_path(self) -> str:
        return "/health" if self.peer else "/ready"

    def node_command(self, redis_url: str, port: int, step_ms: float) -> list[str]:
        node = ["fake_http", str(port)] if self.peer else ["fake_decode", redis_url]
        return [PYTHON, "-m", f"benchmarks.{node[0]}", node[1], "--step-ms", str(step_ms)]

    def command(self, redis_url: str, model: Path, port: int, node_port: int, metrics_port: int) -> list[str]:
        if self.peer:
            at = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
            node = ["--worker-urls", f"http://127.0.0.1:{node_port}", "--policy", "round_robin"]
            return [*self.peer, *at, *node, "--log-level", "error"]
        command = [PYTHON, "-m", "kvferry.services.local.cli", "gateway", "--model", str(model)]
        command += ["--served-model-name", "bench", "--redis-url", redis_url, "--port", str(port)]
        return [*command, "--log-level", "error"]


def peers(venv: Path) -> list[Server]:
    """Those that are installed in `venv`; says of the others that they are not."""
    found = []
    for name, module in (("vllm-router", "vllm_router"), ("sglang-router", "sglang_router")):
        if any(venv.glob(f"lib/python*/site-packages/{module}")):
            found.append(Server(name, peer=(str(venv / "bin" / "python"), "-m", f"{module}.launch_router")))
        else:
            print(f"{name} is left out: it is not installed in {venv}")
    return found
