"""compose/compose.yaml, run for a test by this machine's Docker engine: commands, waits, and questions to what runs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx

COMMAND_LIMIT_S = 900
SERVICES = ("redis", "model", "gateway", "prefill", "decode", "prometheus")
"""All but Grafana, which only draws."""


def docker(*args: str, check: bool = True, stdin: IO[bytes] | None = None) -> subprocess.CompletedProcess[str]:
    """Raises RuntimeError with what it said."""
    return _run(("docker", *args), check=check, stdin=stdin)


def compose_command() -> tuple[str, ...] | None:
    """docker-compose 1.29 or Compose v2, whichever is installed."""
    if shutil.which("docker-compose"):
        return ("docker-compose",)
    has_v2 = shutil.which("docker") and docker("compose", "version", check=False).returncode == 0
    return ("docker", "compose") if has_v2 else None


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 300.0) -> Any:
    """The first true value of `condition`; an HTTP error counts as false. Raises AssertionError after the limit."""
    deadline = time.monotonic() + limit_s
    last: object = None
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
            last = value
        except httpx.HTTPError as exc:
            last = exc
        time.sleep(0.5)
    raise AssertionError(f"not within {limit_s:g} s: {what} (last seen: {last!r})")


class Stack:
    """`folder` is a copy of compose/ with its surroundings: what is built and mounted comes from there."""

    def __init__(self, folder: Path, project: str, tag: str) -> None:
        self.folder = folder
        self.project = project
        self._command = compose_command() or ("docker", "compose")
        self._ports = {name: _free_port() for name in ("KVFERRY_PORT", "PROMETHEUS_PORT")}
        self._environ = os.environ | {name: str(port) for name, port in self._ports.items()} | {"KVFERRY_TAG": tag}
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self._ports['KVFERRY_PORT']}", timeout=120.0, trust_env=False
        )

    def compose(self, *args: str) -> str:
        command = (*self._command, "--project-name", self.project, *args)
        return _run(command, cwd=self.folder, env=self._environ).stdout

    def up(self, *args: str) -> None:
        """Returns when everything is healthy."""
        self.compose("up", "--detach", *args, *SERVICES)
        wait_until(lambda: not self.unhealthy(), f"all containers are healthy, {self.unhealthy()}")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans")

    def containers(self, service: str | None = None) -> list[str]:
        """Names of running and ended ones."""
        labels = [f"label=com.docker.compose.project={self.project}"]
        labels += [f"label=com.docker.compose.service={service}"] if service else []
        filters = [part for label in labels for part in ("--filter", label)]
        return sorted(docker("ps", "--all", "--format", "{{.Names}}", *filters).stdout.split())

    def inspect(self, container: str) -> dict[str, Any]:
        return dict(json.loads(docker("inspect", container).stdout)[0])

    def unhealthy(self) -> dict[str, str]:
        """Containers that are not healthy, with what they are; those that were to end must have ended well."""
        found = {}
        for name in self.containers():
            state = self.inspect(name)["State"]
            health = state.get("Health", {}).get("Status") or f"{state['Status']} {state['ExitCode']}"
            if health not in ("healthy", "exited 0"):
                found[name] = health
        return found

    def nodes(self, role: str) -> list[dict[str, Any]]:
        """Those of the gateway's table that answer."""
        nodes = self.client.get("/cluster").raise_for_status().json()["nodes"]
        return [node for node in nodes if node["role"] == role and node["live"]]

    def say(self, prompt: str, max_tokens: int = 8) -> dict[str, Any]:
        """A completion. Raises httpx.HTTPError when there is none."""
        body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        answer = dict(self.client.post("/v1/completions", json=body).raise_for_status().json())
        assert answer["usage"]["completion_tokens"] == max_tokens, answer
        assert answer["choices"][0]["text"].strip(), answer
        return answer

    def query(self, expression: str) -> dict[str, float]:
        """What Prometheus answers: the value for each label set, as text."""
        url = f"http://127.0.0.1:{self._ports['PROMETHEUS_PORT']}/api/v1/query"
        reply = httpx.get(url, params={"query": expression}, trust_env=False).raise_for_status().json()
        return {
            ",".join(f"{k}={v}" for k, v in sorted(each["metric"].items())): float(each["value"][1])
            for each in reply["data"]["result"]
        }


def _run(
    command: tuple[str, ...],
    *,
    check: bool = True,
    stdin: IO[bytes] | None = None,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        stdin=stdin or subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_LIMIT_S,
        cwd=cwd,
        env=env,
    )
    if check and done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return done


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
