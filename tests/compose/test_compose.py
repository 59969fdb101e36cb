"""compose.yaml for real: images built, containers run, killed, scaled and stopped. `make test-compose` asks for it.

What it needs: a Docker engine, docker-compose 1.29 or Compose v2, and either a registry or (as root) debootstrap and
Debian's packages; wheels come through pip, or from KVFERRY_WHEELHOUSE. Images stay (tag `test`) and make a second run
fast.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.files import ROOT, knobs, load
from tests.compose.stack import Stack, compose_command, docker, wait_until
from tests.compose.stand_ins import ensure

pytestmark = [
    pytest.mark.compose,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        "KVFERRY_TEST_COMPOSE" not in os.environ, reason="builds images and runs containers: `make test-compose`"
    ),
]

PROJECT, TAG = "kvferry-test", "test"
PROMPT = "The ferry crosses the river at dawn, at noon and at dusk, whatever the weather may be. " * 30


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Built and up. A copy of the tree is built, so that the wheelhouse of this one stays as it is."""
    if docker("version", check=False).returncode:
        pytest.fail("no Docker engine answers (`docker version`)")
    if compose_command() is None:
        pytest.fail("neither docker-compose nor Compose v2 is installed")
    base, services = knobs()["KVFERRY_BASE_IMAGE"], load("compose.yaml")["services"]
    for image in (base, services["redis"]["image"], services["prometheus"]["image"]):
        ensure(image, base)
    tree = tmp_path_factory.mktemp("compose") / "tree"
    _copy_tree(tree)
    _fill(tree / "compose/wheelhouse")
    stack = Stack(tree / "compose", PROJECT, TAG)
    stack.down()
    try:
        stack.compose("build", "gateway", "model")
        stack.up()
        yield stack
    finally:
        if request.session.testsfailed or sys.exc_info()[0]:
            print(stack.compose("logs", "--no-color", "--tail=60"))
        stack.down()
        stack.client.close()


def _copy_tree(tree: Path) -> None:
    tree.mkdir()
    listing = subprocess.run(
        ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"),
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = [name for name in listing.stdout.decode().split("\0") if name and os.path.lexists(ROOT / name)]
    for name in names:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)


def _fill(wheelhouse: Path) -> None:
    """pip inside a build may reach nothing; here it may."""
    ready = os.environ.get("KVFERRY_WHEELHOUSE")
    if not ready:
        ready = str(wheelhouse)
        subprocess.run(("make", "wheelhouse", f"WHEELHOUSE={ready}"), cwd=ROOT, check=True)
        # for a base image with a Python older than 3.11.3
        command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", ready, "async-timeout")
        subprocess.run(command, check=True)
    for wheel in Path(ready).glob("*.whl"):
        if not (wheelhouse / wheel.name).exists():
            shutil.copy2(wheel, wheelhouse)


def _all_nodes_are_back(stack: Stack, num_prefill: int = 2, num_decode: int = 2) -> bool:
    return len(stack.nodes("prefill")) == num_prefill and len(stack.nodes("decode")) == num_decode


def test_up_gives_two_nodes_of_each_kind_with_addresses_of_their_own(stack: Stack) -> None:
    wait_until(lambda: _all_nodes_are_back(stack), "four nodes are in the gateway's table")
    nodes = stack.nodes("prefill") + stack.nodes("decode")
    hosts = {node["address"].rpartition(":")[0] for node in nodes}
    assert len(hosts) == len({node["node_id"] for node in nodes}) == 4
    assert not hosts & {"0.0.0.0", "127.0.0.1"}


def test_containers_are_confined(stack: Stack) -> None:
    for name in stack.containers():
        found = stack.inspect(name)
        host = found["HostConfig"]
        assert (host["ReadonlyRootfs"], host["CapDrop"], host["Privileged"]) == (True, ["ALL"], False), name
        assert "no-new-privileges:true" in host["SecurityOpt"], name
        if found["State"]["Running"]:
            assert docker("exec", name, "id", "-u").stdout.strip() not in ("", "0"), name
            assert docker("exec", name, "touch", "/etc/x", check=False).returncode != 0, name


def test_a_long_prompt_crosses_through_shared_memory_and_prometheus_shows_it(stack: Stack) -> None:
    stack.say("One. " + PROMPT)
    moved = wait_until(
        lambda: stack.query('sum by (transport) ({__name__="kvferry:transfer_bytes_total"}) > 0'),
        "Prometheus has seen bytes being moved",
    )
    assert set(moved) == {"transport=shm"}
    files = docker("exec", stack.containers("decode")[0], "ls", "/run/kvferry").stdout.split()
    assert sum(name.endswith(".pool") for name in files) == 4


def test_a_repeated_prompt_is_found_in_the_cache(stack: Stack) -> None:
    first = stack.say("Two. " + PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"]
    again = stack.say("Two. " + PROMPT)["usage"]
    assert first == 0
    assert again["prompt_tokens_details"]["cached_tokens"] > again["prompt_tokens"] // 2


@pytest.mark.parametrize("kind", ["redis", "prefill", "decode"])
def test_without_one_container_of_a_kind_the_service_goes_on(stack: Stack, kind: str) -> None:
    victim = stack.containers(kind)[0]
    docker("kill", victim)
    try:
        for n in range(4):
            stack.say(f"{kind} {n}. " + PROMPT[:1000])
    finally:
        docker("start", victim)
    wait_until(lambda: not stack.unhealthy() and _all_nodes_are_back(stack), f"{victim} is back")
    wait_until(lambda: stack.client.get("/cluster").json()["index"]["ok"], "the index answers")
    stack.say(f"{kind} is back. " + PROMPT[:1000])


@pytest.mark.parametrize("kind", ["gateway", "redis", "prefill", "decode"])
def test_what_crashes_is_started_again(stack: Stack, kind: str) -> None:
    victim = stack.containers(kind)[0]
    before = stack.inspect(victim)
    os.kill(before["State"]["Pid"], signal.SIGKILL)
    wait_until(lambda: stack.inspect(victim)["RestartCount"] > before["RestartCount"], f"{victim} is started again")
    wait_until(lambda: not stack.unhealthy() and _all_nodes_are_back(stack), f"{victim} is back")
    stack.say(f"{kind} has crashed. " + PROMPT[:1000])


def test_a_third_prefill_node_joins_and_is_scraped(stack: Stack) -> None:
    stack.up("--scale", "prefill=3")
    wait_until(lambda: _all_nodes_are_back(stack, num_prefill=3), "the third prefill node is in the gateway's table")
    up = "count by (job) (up == 1)"
    everybody = {"job=gateway": 1, "job=prefill": 3, "job=decode": 2}
    wait_until(lambda: stack.query(up) == everybody, f"Prometheus scrapes {everybody}")
    stack.say("Three. " + PROMPT)


def test_a_term_signal_before_python_has_its_handlers_ends_a_container_at_once(stack: Stack) -> None:
    found_no_redis = code = 2  # it was not stopped before it could see that
    for _ in range(5):
        name = docker("run", "--detach", "--read-only", f"kvferry-worker:{TAG}", "prefill").stdout.strip()
        try:
            docker("kill", "--signal", "TERM", name, check=False)
            code = int(docker("wait", name).stdout)
        finally:
            docker("rm", "--force", name)
        if code != found_no_redis:
            break
    assert code == 128 + signal.SIGTERM


def test_images_run_under_any_user_without_a_home(stack: Stack) -> None:
    anyone = ("run", "--rm", "--read-only", "--user", "4242:4242", "--entrypoint", "python")
    docker(*anyone, f"kvferry-gateway:{TAG}", "-c", "import kvferry.services.gateway.app")
    docker(*anyone, f"kvferry-worker:{TAG}", "-c", "import torch, kvferry.services.decode.service")
    has_torch = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is not None)"
    docker(*anyone, f"kvferry-gateway:{TAG}", "-c", has_torch)


def test_stop_lets_everything_end_by_itself_and_down_leaves_nothing(stack: Stack) -> None:
    stack.compose("stop")
    codes = {name: stack.inspect(name)["State"]["ExitCode"] for name in stack.containers()}
    assert set(codes.values()) == {0}, codes
    stack.down()
    label = f"label=com.docker.compose.project={PROJECT}"
    for things in (("ps", "--all"), ("volume", "ls"), ("network", "ls")):
        assert docker(*things, "--quiet", "--filter", label).stdout == "", things
