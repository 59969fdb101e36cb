"""What compose/ promises, read from its files. tests/compose/test_compose.py runs them."""

from __future__ import annotations

import re
import subprocess
import tomllib
from typing import Any

import pytest

from kvferry.common.config import load_config
from kvferry.common.cores import NODE_ENVIRON
from kvferry.common.models import ALIASES
from tests.compose.files import COMPOSE, ROOT, knobs, load, stages, used_knobs
from tests.compose.stack import compose_command

SERVICES: dict[str, dict[str, Any]] = load("compose.yaml")["services"]
OURS = ("gateway", "prefill", "decode")
NODES = ("prefill", "decode")


@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "gpu.yaml")])
def test_compose_accepts_the_files(files: tuple[str, ...]):
    command = compose_command()
    if command is None:
        pytest.skip("neither docker-compose nor Compose v2 is installed")
    named = [part for file in files for part in ("-f", file)]
    done = subprocess.run((*command, *named, "config", "-q"), cwd=COMPOSE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "not set" not in done.stderr


def test_each_knob_has_a_value_and_each_value_a_use():
    assert used_knobs("compose.yaml") | used_knobs("gpu.yaml") == knobs().keys() - {"COMPOSE_PROJECT_NAME"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined_checked_and_bounded(name: str):
    service = SERVICES[name]
    stage = stages()[service["build"]["target"]] if "build" in service else None
    user = service.get("user") or (stage.user if stage else "root")
    assert re.match(r"[1-9]\d*:", user), f"{name} runs as {user}"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["logging"]["options"].keys() == {"max-size", "max-file"}
    assert re.search(r":(v?\d|dev$)", service["image"]), "a tag says which version"
    if name == "model":
        assert service["healthcheck"] == {"disable": True}  # it ends, and the others wait for that
        assert service["restart"] == "no"
    else:
        assert "test" in service.get("healthcheck", {}) or (stage is not None and stage.has_health_check)
        assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_stands_in_the_way_of_scaling_nodes_and_ports_are_local(name: str):
    service = SERVICES[name]
    assert "container_name" not in service
    assert "hostname" not in service
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:")
        assert name not in NODES


@pytest.mark.parametrize("name", OURS)
def test_ours_wait_for_the_model_and_outlive_their_drain(name: str):
    service = SERVICES[name]
    assert service["depends_on"]["model"] == {"condition": "service_completed_successfully"}
    assert service["depends_on"]["redis"] == {"condition": "service_healthy"}
    assert int(service["stop_grace_period"].removesuffix("s")) > load_config(environ={}).node.drain_s + 5


@pytest.mark.parametrize("name", OURS)
def test_their_environment_is_a_configuration_that_serves_other_containers(name: str):
    service = SERVICES[name]
    given = {name: str(value) for name, value in service["environment"].items()}
    config = load_config(environ=stages()[service["build"]["target"]].environ | given)
    assert config.cluster.redis_url == "redis://redis:6379/0"
    if name == "gateway":
        assert config.gateway.host == "0.0.0.0"
        return
    assert (config.node.node_host, config.node.advertise_host, config.node.node_id) == ("0.0.0.0", None, None)
    assert config.node.transports[0] == "shm"
    assert f"pools:{config.node.shm_dir}" in service["volumes"]
    assert given["OMP_NUM_THREADS"] == str(config.engine.num_threads)


def test_pools_lie_in_a_tmpfs_that_the_worker_owns():
    options = load("compose.yaml")["volumes"]["pools"]["driver_opts"]
    assert options["type"] == "tmpfs"
    uid, gid = stages()["worker"].user.split(":")
    assert {f"uid={uid}", f"gid={gid}", "mode=0700"} <= set(options["o"].split(","))


@pytest.mark.parametrize("target", ["gateway", "worker"])
def test_an_image_has_an_init_and_what_a_computing_process_wants(target: str):
    stage = stages()[target]
    assert stage.entrypoint == '["dumb-init", "--", "kvferry"]'
    assert stage.environ.items() >= NODE_ENVIRON.items()


def test_prometheus_scrapes_every_service_of_ours_by_its_name():
    jobs = load("prometheus/prometheus.yml")["scrape_configs"]
    found = {job["job_name"]: (job["dns_sd_configs"][0]["names"], job["dns_sd_configs"][0]["port"]) for job in jobs}
    port = int(stages()["worker"].environ["KVFERRY_NODE__METRICS_PORT"])
    gateway_port = int(SERVICES["gateway"]["ports"][0].rpartition(":")[2])
    assert found == {"gateway": (["gateway"], gateway_port)} | {role: ([role], port) for role in NODES}


def test_images_are_built_of_pinned_packages_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["worker"], "dumb-init", "setuptools"]
    names = {re.split(r"[\[<>=;]", each)[0].strip().lower() for each in wanted}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert names <= {line.partition("==")[0].lower() for line in lines if "==" in line}


def test_no_pin_refuses_a_build_of_torch_for_one_cuda_version_or_another():
    """Each asks for its own major version of these."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    names = {line.partition("==")[0] for line in lines if "==" in line}
    assert not names & {"cuda-bindings", "cuda-toolkit"}
    assert not [name for name in names if name.startswith("nvidia-") and name != "nvidia-ml-py"]


def test_the_wheelhouse_has_the_wheel_of_the_default_model():
    source = ALIASES[knobs()["KVFERRY_MODEL"]]
    assert f"{source.distribution}=={source.version}" in (ROOT / "Makefile").read_text()
