"""`kvferry tune`: the production checklist for this machine and model. Measures, then says what to change and why."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import resource
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvferry.common.config import DECODE_MAX_STEP_MS, Config
from kvferry.common.cores import available_cores, available_memory_bytes
from kvferry.common.errors import ConfigError
from kvferry.common.models import resolve_model
from kvferry.services.local import tune_advice as rules
from kvferry.services.local.tune_advice import PROBE_PERIOD_S, Advice, Check, Goal, Machine
from kvferry.services.local.tune_measure import BUDGETS, Bench, cold_start_s

_MEMORY_SHARE = 0.8  # of what is available, that a pool may take


@dataclass(frozen=True, slots=True)
class Options:
    goal: Goal
    concurrency: int
    tokens: int
    prompts: Path | None
    write_config: Path | None
    write_kustomize: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Options:
        """Raises ConfigError for what no measurement could make sense of."""
        if args.concurrency < 1 or args.tokens_per_request < 1:
            raise ConfigError(
                f"--concurrency {args.concurrency} and --tokens-per-request {args.tokens_per_request}: at least 1"
            )
        return cls(
            args.goal,
            args.concurrency,
            args.tokens_per_request,
            args.prompts,
            args.write_config,
            args.write_kustomize,
        )


@dataclass(frozen=True, slots=True)
class Findings:
    advice: list[Advice]
    checks: list[Check]

    @property
    def changes(self) -> list[Advice]:
        return [advice for advice in self.advice if advice.changes]


def main(config: Config, options: Options) -> int:
    """Prints what was found; 0 also where something should change. Raises StartupError and KvferryError."""
    sample = read_sample(options.prompts)
    print("starting a node, to see how long it takes ...", flush=True)
    cold_s = asyncio.run(cold_start_s(config))
    print("computing prompts in chunks of several sizes ...", flush=True)
    bench = Bench(config)
    try:
        found = _find(config, options, bench, cold_s, sample)
    finally:
        bench.close()
    print(report(found))
    if options.write_config is not None:
        options.write_config.write_text(config_file(found.changes))
        print(f"\nwritten: {options.write_config}; use it as: kvferry up --config {options.write_config}")
    if options.write_kustomize is not None:
        options.write_kustomize.write_text(kustomize_patch(found.changes))
        print(f"\nwritten: {options.write_kustomize}; its first lines say how a kustomization uses it")
    return 0


def _find(config: Config, options: Options, bench: Bench, cold_s: float, sample: Sequence[str]) -> Findings:
    import torch

    built, engine = bench.built, config.engine
    limits, num_blocks = built.engine.scheduler.limits, built.engine.pool.num_blocks
    on_gpu = engine.device != "cpu" and torch.cuda.is_available()
    machine = _machine(config, on_gpu, torch.cuda.device_count() if on_gpu else 0)
    # On a GPU the pool takes its share of the device's memory by itself, and has a mirror of that size outside.
    room = 0 if on_gpu else int(min(machine.memory_bytes, machine.shm_free_bytes) * _MEMORY_SHARE)
    advice = rules.probe(cold_s)
    advice += rules.capacity(
        num_blocks=num_blocks,
        block_bytes=built.card.block_bytes,
        block_size=built.card.block_size,
        tokens=min(options.tokens, built.max_model_len),
        concurrency=options.concurrency,
        now=limits.max_num_seqs,
        room_bytes=room,
    )
    speeds = bench.sweep(BUDGETS["cuda" if on_gpu else "cpu"])
    for speed in speeds:
        print(f"  {speed.budget:5d} tokens: {speed.tokens_per_s:6.0f} tokens/s, steps of up to {speed.step_ms:.0f} ms")
    max_step_ms = engine.max_step_ms or DECODE_MAX_STEP_MS
    advice.append(rules.budget(speeds, options.goal, max_step_ms, limits.max_num_batched_tokens))
    if sample:
        from kvferry.services.gateway.tokenizer import Tokenizer

        encode = Tokenizer.load(resolve_model(config.cluster.model, weights=False)).encode
        gain = bench.gain([encode(text, add_special_tokens=True) for text in sample])
        advice.append(rules.caching(gain, engine.enable_prefix_caching))
    pool_bytes = num_blocks * built.card.block_bytes
    checks = rules.checks(machine, pool_bytes, config.node.transports, torch.get_num_threads())
    if not sample:
        checks.append(
            Check("prefix caching", "not measured", "--prompts FILE: one prompt a line, in the order they come")
        )
    return Findings(advice, checks)


def _machine(config: Config, on_gpu: bool, num_gpus: int) -> Machine:
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    available = available_memory_bytes()
    return Machine(
        cores=available_cores(),
        shm_free_bytes=shutil.disk_usage(config.node.shm_dir).free,
        memory_bytes=available,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        num_gpus=num_gpus,
        has_ucx=importlib.util.find_spec("ucxx") is not None,
        on_gpu=on_gpu,
    )


def read_sample(path: Path | None) -> list[str]:
    """One prompt per line: text, or an object with `prompt`. Raises ConfigError that names the line."""
    if path is None:
        return []
    try:
        lines = path.read_text().splitlines()
    except OSError as exc:
        raise ConfigError(f"--prompts {path}: {exc.strerror}") from exc
    return [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _prompt(path: Path, number: int, line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError) as exc:
        raise ConfigError(f"--prompts {path}:{number}: expected text, or an object with `prompt`") from exc
    return str(prompt)


def report(found: Findings) -> str:
    lines = ["", "what to set:"]
    for advice in found.advice:
        was = "" if advice.now is None else f" (now {advice.now})"
        mark = "->" if advice.changes else "ok"
        lines += [f"  {mark} {advice.section}.{advice.option} = {advice.then}{was}", f"       {advice.why}"]
    lines += ["", "what the machine gives:"]
    for check in found.checks:
        lines.append(f"  {'!!' if check.cure else 'ok'} {check.name}: {check.found}")
        if check.cure:
            lines.append(f"       {check.cure}")
    return "\n".join(lines)


def config_file(changes: Iterable[Advice]) -> str:
    """TOML for `--config`: what changes, each with its reason."""
    text = "# Made by `kvferry tune`.\n"
    section = ""
    for advice in sorted((a for a in changes if a.section != "startupProbe"), key=lambda a: a.section):
        if advice.section != section:
            section = advice.section
            text += f"\n[{section}]\n"
        text += f"# {advice.why}\n{advice.option} = {json.dumps(advice.then)}\n"
    return text


def kustomize_patch(changes: Iterable[Advice]) -> str:
    """A strategic merge patch for the Deployments of all pools."""
    changes = list(changes)
    probe = {a.option: a.then for a in changes if a.section == "startupProbe"}
    environ = [
        {"name": f"KVFERRY_{a.section}__{a.option}".upper(), "value": str(a.then)}
        for a in changes
        if a.section != "startupProbe"
    ]
    node: dict[str, Any] = {"name": "node", "startupProbe": {**probe, "periodSeconds": PROBE_PERIOD_S}}
    if environ:
        node["env"] = environ
    spec: dict[str, Any] = {"containers": [node]}
    for pool in (a for a in changes if a.option == "kv_cache_memory"):
        size = f"{int(pool.then * rules.POOL_MARGIN) >> 20}Mi"
        spec["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}]
    patch = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "node"},
        "spec": {"template": {"spec": spec}},
    }
    head = (
        "# Made by `kvferry tune`. In an overlay's kustomization.yaml:\n#\n#   patches:\n#     - path: THIS_FILE\n"
        '#       target: {kind: Deployment, labelSelector: "kvferry.io/pool in (prefill, decode)"}\n#\n'
    )
    head += "".join(f"# {a.option}: {a.why}\n" for a in changes)
    if "volumes" in spec:
        head += "# The pool counts into the container's memory: raise resources.limits.memory with it.\n"
    return head + yaml.safe_dump(patch, sort_keys=False)
