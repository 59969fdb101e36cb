"""Clients of others against a cluster of one prefill and one decode node, each in an environment of its own.

    make test-clients                       all of them, with a tiny model
    make test-clients ARGS="litellm"        only these

An environment is made once, in `.venv-clients/PACKAGE`, from the package index.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import cluster
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


@dataclass(frozen=True)
class Client:
    """`command`: what runs in the environment; {url}, {model}, {tokenizer} and {folder} are filled in."""

    package: str
    command: tuple[str, ...]


def _script(name: str) -> tuple[str, ...]:
    return "python", str(Path(__file__).parent / name), "{url}", "{model}"


CLIENTS = {
    "litellm": Client("litellm==1.110.2", _script("with_litellm.py")),
    "langchain": Client("langchain-openai==1.7.4", _script("with_langchain.py")),
    "guidellm": Client(
        "guidellm==0.8.1",
        (
            *("guidellm", "run", "--backend", "kind=openai_http,target={url},model={model}"),
            *("--tokenizer", "kind=huggingface_auto,model={tokenizer}", "--profile", "kind=synchronous"),
            *("--constraint", "kind=max_requests,count=5", "--constraint", "kind=max_errors,count=1"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--disable-progress"),
            *("--output", "kind=json,path={folder}/guidellm.json"),
        ),
    ),
    "aiperf": Client(
        "aiperf==0.13.0",
        (
            *("aiperf", "profile", "--model", "{model}", "--url", "{url}", "--endpoint-type", "chat", "--streaming"),
            *("--tokenizer", "{tokenizer}", "--request-count", "8", "--concurrency", "2"),
            *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8", "--ui", "none"),
            *("--artifact-dir", "{folder}/aiperf"),
        ),
    ),
}


def environment(package: str) -> Path:
    """Its folder of programs."""
    folder = ROOT / ".venv-clients" / package.partition("==")[0]
    programs = folder / "bin"
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([programs / "pip", "install", "--quiet", package], check=True)
        (folder / ".installed").touch()
    return programs


def run(client: Client, programs: Path, **filled: str) -> tuple[bool, str]:
    """Whether it succeeded, and all that it said."""
    first, *rest = [part.format(**filled) for part in client.command]
    try:
        done = subprocess.run(
            [programs / first, *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            cwd=filled["folder"],
        )
    except subprocess.TimeoutExpired as exc:
        return False, f"{exc.stdout!r}: no end within {TIMEOUT_S} s"
    return done.returncode == 0, done.stdout


def main(names: Sequence[str]) -> int:
    chosen = {name: CLIENTS[name] for name in names or CLIENTS}
    programs = {name: environment(client.package) for name, client in chosen.items()}
    failed = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = write_tiny_model(folder / "model")
        (folder / "cluster").mkdir()
        with cluster(folder / "cluster", str(model)) as nodes:
            prefill = nodes.start_node("prefill", wait=False)
            nodes.start_node("decode", "--local-prefill-max-tokens", "0")
            nodes.wait_node(prefill)
            gateway = nodes.start_gateway("--tool-call-parser", "hermes")
            for name, client in chosen.items():
                before = gateway.metric("kvferry:request_success_total", finished_reason="length")
                filled = {"url": gateway.url, "model": "test", "tokenizer": str(model), "folder": made}
                succeeded, said = run(client, programs[name], **filled)
                served = gateway.metric("kvferry:request_success_total", finished_reason="length") - before
                print(f"{name}: {'ok' if succeeded else 'FAILED'}, {served:g} completions of full length")
                if not succeeded:
                    failed.append(name)
                    print(said[-4000:])
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
