"""`kvferry tune`: each rule by its numbers, and all of it on a tiny model, whose files are then really loaded."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvferry.common.config import load_config
from kvferry.common.errors import ConfigError
from kvferry.services.local import tune_advice as rules
from kvferry.services.local.tune import config_file, kustomize_patch, read_sample
from kvferry.services.local.tune_advice import Advice, Machine
from kvferry.services.local.tune_measure import ChunkSpeed, PrefixGain
from tests.local.processes import environ_without_kvferry
from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).parents[2]
GIB = 2**30
SPEEDS = [ChunkSpeed(64, 300, 200), ChunkSpeed(128, 480, 270), ChunkSpeed(256, 500, 520), ChunkSpeed(512, 490, 1100)]
MACHINE = Machine(8, 4 * GIB, 16 * GIB, 65536, None, 0, False, False)


def by_option(advice: list[Advice]) -> dict[str, Advice]:
    return {each.option: each for each in advice}


@pytest.mark.parametrize("cold_s", [0.4, 7.0, 93.0, 600.0])
def test_probes_clear_a_start_with_a_margin_and_are_not_asked_too_late(cold_s: float) -> None:
    found = by_option(rules.probe(cold_s))
    delay_s, threshold = found["initialDelaySeconds"].then, found["failureThreshold"].then
    assert delay_s + threshold * rules.PROBE_PERIOD_S >= max(3 * cold_s, 60)
    assert delay_s < max(cold_s, 1)


def capacity(**options: int) -> dict[str, Advice]:
    given = {"num_blocks": 640, "block_bytes": 2**20, "block_size": 16, "tokens": 320, "concurrency": 32, "now": 128}
    return by_option(rules.capacity(**{**given, "room_bytes": 0, **options}))


def test_sequences_are_what_the_pool_holds_or_what_is_expected() -> None:
    assert capacity()["max_num_seqs"].then == 640 // 20 == 32
    assert capacity(concurrency=10)["max_num_seqs"].then == 10
    short = capacity(concurrency=100)
    assert short["max_num_seqs"].then == 32
    assert "more nodes or memory" in short["max_num_seqs"].why
    assert "kv_cache_memory" not in short, "there is no room for a larger pool"


def test_a_pool_grows_to_what_is_expected_and_no_further_than_memory() -> None:
    enough = capacity(concurrency=100, room_bytes=4 * GIB)
    assert 100 * 20 * 2**20 <= enough["kv_cache_memory"].then < 4 * GIB
    assert enough["max_num_seqs"].then == 100
    limited = capacity(concurrency=100, room_bytes=GIB)
    assert limited["kv_cache_memory"].then == GIB
    assert limited["max_num_seqs"].then == GIB // 2**20 // 20


def test_chunks_are_the_smallest_near_the_best_or_the_fastest_within_a_step() -> None:
    assert rules.budget(SPEEDS, "throughput", 100, 256).then == 128
    assert rules.budget(SPEEDS, "latency", 300, 256).then == 128
    assert rules.budget(SPEEDS, "latency", 210, 256).then == 64
    unreachable = rules.budget(SPEEDS, "latency", 100, 256)
    assert unreachable.then == 64
    assert "no step is under 100 ms" in unreachable.why


def test_caching_is_never_switched_off_and_its_gain_is_said() -> None:
    advice = rules.caching(PrefixGain(4, 1000, 750, 1.0, 3.0), False)
    assert (advice.then, advice.changes) == (True, True)
    assert "75% of 1000 tokens" in advice.why
    assert "little gain" in rules.caching(PrefixGain(4, 1000, 0, 3.0, 3.0), True).why


def test_each_check_finds_its_lack() -> None:
    def cures(machine: Machine, transports: tuple[str, ...] = ("shm", "grpc"), threads: int = 4) -> dict[str, str]:
        return {c.name: c.cure for c in rules.checks(machine, GIB, transports, threads) if c.cure}

    assert cures(MACHINE) == {}
    assert "--num-threads 8" in cures(MACHINE, threads=9)["cores"]
    gpus = Machine(9, 4 * GIB, 16 * GIB, 65536, None, 8, True, True)
    assert "10 cores for 8 GPUs" in cures(gpus)["cores"]
    assert "1126 MiB" in cures(Machine(8, 2**26, GIB, 65536, None, 0, False, False))["/dev/shm"]
    assert "ulimit -n" in cures(Machine(8, 4 * GIB, GIB, 1024, None, 0, False, False))["open files"]
    assert "kvferry[ucx]" in cures(MACHINE, ("ucx", "grpc"))["transports"]
    locked = Machine(10, 4 * GIB, GIB, 65536, 2**16, 8, True, True)
    assert "ulimit -l" in cures(locked, ("ucx", "grpc"))["locked memory"]


CHANGES = [
    *rules.probe(20.0),
    Advice("engine", "kv_cache_memory", 1, 3 * GIB, "more"),
    Advice("engine", "max_num_seqs", 128, 48, "fits"),
    Advice("engine", "enable_prefix_caching", False, True, "gain"),
]


def test_the_written_file_is_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "tuned.toml"
    path.write_text(config_file(CHANGES))
    engine = load_config(file=str(path), environ={}).engine
    assert (engine.kv_cache_memory, engine.max_num_seqs, engine.enable_prefix_caching) == (3 * GIB, 48, True)


def test_kubectl_applies_the_written_patch_to_every_pool(tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "patch.yaml").write_text(kustomize_patch(CHANGES))
    overlay = tmp_path / "k8s/overlays/tuned"
    overlay.mkdir()
    shutil.copy(tmp_path / "patch.yaml", overlay / "patch.yaml")
    use = re.search(r"#   patches:.*?\n#\n", (overlay / "patch.yaml").read_text(), re.DOTALL)
    assert use is not None
    patches = use[0].replace("THIS_FILE", "patch.yaml").replace("#   ", "").replace("#\n", "")
    (overlay / "kustomization.yaml").write_text(f"resources: [../cpu-demo]\n{patches}")
    made = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    pools = [
        found["spec"]["template"]["spec"]
        for found in yaml.safe_load_all(made.stdout)
        if found["kind"] == "Deployment" and found["metadata"]["name"] in ("prefill", "decode")
    ]
    assert len(pools) == 2
    for pod in pools:
        (node,) = pod["containers"]
        probe = node["startupProbe"]
        assert (probe["initialDelaySeconds"], probe["failureThreshold"], probe["periodSeconds"]) == (10, 10, 5)
        assert probe["grpc"] == {"port": 7000}, "what the base says stays"
        environ = {item["name"]: item.get("value") for item in node["env"]}
        assert "KVFERRY_NODE__NODE_ID" in environ
        settings = load_config(environ={name: value for name, value in environ.items() if value is not None})
        assert (settings.engine.max_num_seqs, settings.engine.kv_cache_memory) == (48, 3 * GIB)
        (shm,) = (volume for volume in pod["volumes"] if volume["name"] == "shm")
        assert shm["emptyDir"]["sizeLimit"] == "3379Mi"


def test_a_sample_that_cannot_be_read_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "sample"
    path.write_text('plain\n\n{"prompt": "json"}\n')
    assert read_sample(path) == ["plain", "json"]
    path.write_text('plain\n{"text": 1}\n')
    with pytest.raises(ConfigError, match="sample:2"):
        read_sample(path)


def test_it_measures_a_model_and_writes_what_it_found(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    sample = tmp_path / "sample"
    shared = "The prompt is computed on one node and the tokens are produced on another one. " * 3
    sample.write_text(f"{shared}first\n{shared}second\n")
    written = tmp_path / "tuned.toml"
    command = [sys.executable, "-m", "kvferry.services.local.cli", "tune", "--model", str(model)]
    command += ["--kv-cache-memory", "8MiB", "--concurrency", "7", "--tokens-per-request", "200"]
    command += ["--prompts", str(sample), "--write-config", str(written), "--log-level", "error"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environ_without_kvferry(), stdout=pipe, stderr=pipe, text=True) as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert re.search(r"failureThreshold = \d+\n +a start took [\d.]+ s here", out), out
    assert "max_num_seqs = 7 (now 128)" in out
    assert re.search(r"max_num_batched_tokens = (32|64|128|256|512)", out)
    hits = re.search(r"2 prompts of the sample: (\d+)% of", out)
    assert hits is not None
    assert 30 <= int(hits[1]) < 50, "the second one, but for its end"
    assert load_config(file=str(written), environ={}).engine.max_num_seqs == 7
    assert not list(Path("/dev/shm").glob(f"*tune-{process.pid}*")), "no pool is left"
