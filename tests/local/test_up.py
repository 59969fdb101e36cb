"""`kvferry up` with its real supervisor and Redis, and services that stand in for those with a model."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvferry.services.local.plan import free_ports
from tests.index.servers import RedisServer, binaries
from tests.local.processes import alive, environ_without_kvferry, read_pid, wait_until

HERE = Path(__file__).parent


class Up:
    """One `kvferry up` in a process of its own."""

    def __init__(self, folder: Path, *flags: str, **environ: str) -> None:
        self.folder = folder
        self.temp = Path(tempfile.mkdtemp(prefix="up-"))
        model = folder / "model"
        model.mkdir(exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            (model / name).touch()
        self.port = free_ports("127.0.0.1", 1)[0]
        start = (
            "import sys; from kvferry.services.local import plan, cli;"
            f"plan.CLI = (sys.executable, {str(HERE / 'fake_cli.py')!r});"
            "sys.exit(cli.main(sys.argv[1:]))"
        )
        environ = {"FAKE_FOLDER": str(folder), "TMPDIR": str(self.temp), **environ}
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", start, "up", "--model", str(model), "--port", str(self.port), *flags],
                env=environ_without_kvferry() | environ,
                stdout=out,
                stderr=err,
            )

    def wait_ready(self) -> None:
        wait_until(lambda: "curl" in self.out.read_text() or self.process.poll() is not None, 60)
        assert self.process.poll() is None, self.err.read_text()

    def interrupt(self, sig: signal.Signals = signal.SIGINT) -> None:
        self.process.send_signal(sig)

    def wait(self) -> int:
        return self.process.wait(60)

    def pid(self, name: str) -> int:
        return read_pid(self.folder / f"{name}.pid")

    def assert_nothing_left(self) -> None:
        assert list(self.temp.iterdir()) == []
        for file in self.folder.glob("*.pid"):
            assert not alive(int(file.read_text())), file.name


@pytest.fixture
def up(tmp_path):
    started = []

    def start(*flags: str, **environ: str) -> Up:
        started.append(Up(tmp_path, *flags, **environ))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        shutil.rmtree(each.temp)


def test_it_says_when_each_part_is_ready_and_how_to_use_it(up):
    cluster = up("--prefill", "2", "--decode", "1")
    cluster.wait_ready()
    shown, usage = cluster.err.read_text(), cluster.out.read_text()
    for name in ("redis", "prefill-0", "prefill-1", "decode-0", "gateway"):
        assert re.search(rf"{name} ready after [\d.]+ s", shown)
    assert f"http://127.0.0.1:{cluster.port}" in usage
    command = usage[usage.index("curl") :]
    assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
    cluster.interrupt()
    assert cluster.wait() == 0


def test_ctrl_c_drains_the_gateway_first_and_leaves_nothing(up, tmp_path):
    cluster = up("--decode", "2")
    cluster.wait_ready()
    cluster.interrupt()
    assert cluster.wait() == 0
    ended = (tmp_path / "ended").read_text().split()
    assert ended[0] == "gateway"
    assert set(ended[1:]) == {"prefill-0", "decode-0", "decode-1"}
    cluster.assert_nothing_left()


def test_sigterm_does_the_same(up):
    cluster = up()
    cluster.wait_ready()
    cluster.interrupt(signal.SIGTERM)
    assert cluster.wait() == 0
    cluster.assert_nothing_left()


def test_a_second_ctrl_c_ends_at_once_and_leaves_nothing(up):
    cluster = up(FAKE_DECODE="stubborn")
    cluster.wait_ready()
    cluster.interrupt()
    wait_until(lambda: not alive(cluster.pid("gateway")))
    assert cluster.process.poll() is None
    cluster.interrupt()
    assert cluster.wait() == 130
    cluster.assert_nothing_left()


def test_a_crashed_node_comes_back_under_its_name_and_port(up):
    cluster = up(FAKE_PREFILL="crash")
    cluster.wait_ready()
    first = cluster.pid("prefill-0")
    wait_until(lambda: cluster.err.read_text().count("prefill-0 ready after") == 2)
    shown = cluster.err.read_text()
    assert "prefill-0 ended with status 7" in shown
    assert "about to crash" in shown
    assert cluster.pid("prefill-0") != first
    cluster.interrupt()
    assert cluster.wait() == 0
    cluster.assert_nothing_left()


def test_a_node_that_is_configured_wrongly_ends_it_with_the_nodes_words(up):
    cluster = up(FAKE_DECODE="config")
    assert cluster.wait() == 2
    assert cluster.err.read_text().splitlines()[-1] == "kvferry: decode-0: decode has a wrong option"
    cluster.assert_nothing_left()


def test_ctrl_c_while_it_starts_leaves_nothing(up):
    cluster = up(FAKE_GATEWAY="crash")
    wait_until(lambda: "starting" in cluster.err.read_text())
    cluster.interrupt()
    assert cluster.wait() == 0
    assert "curl" not in cluster.out.read_text()
    cluster.assert_nothing_left()


def test_too_slow_a_start_is_an_error_that_names_who_is_missing(up):
    cluster = up("--ready-timeout", "5", FAKE_PREFILL="stuck")
    assert cluster.wait() == 2
    assert re.search(r"not ready within 5 s \(--ready-timeout\): .*prefill-0", cluster.err.read_text().splitlines()[-1])
    cluster.assert_nothing_left()


def test_children_end_when_it_is_killed(up):
    cluster = up()
    cluster.wait_ready()
    pids = [cluster.pid(name) for name in ("gateway", "decode-0", "prefill-0")]
    cluster.process.kill()
    wait_until(lambda: not any(map(alive, pids)))


def error_of(cluster: Up) -> str:
    """The one line of an `up` that gave up at once."""
    assert cluster.wait() == 2
    cluster.assert_nothing_left()
    [line] = [line for line in cluster.err.read_text().splitlines() if line.startswith("kvferry: ")]
    assert "Traceback" not in cluster.err.read_text()
    return line


def test_a_port_in_use_is_said_before_anything_is_started(up, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in error_of(up("--port", str(port)))
    assert not list(tmp_path.glob("*.pid"))


def test_a_redis_that_does_not_answer_is_said_without_its_password(up):
    line = error_of(up("--redis-url", "redis://:secret@127.0.0.1:1/0"))
    assert "redis://127.0.0.1:1/0" in line
    assert "secret" not in line


def test_a_folder_that_is_no_model_is_said(up, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no config.json" in error_of(up("--model", str(empty)))


def test_a_cluster_without_a_decode_node_is_refused(up):
    assert "--decode 1" in error_of(up("--decode", "0"))


def test_its_own_redis_is_not_started_beside_another(up, tmp_path):
    (tmp_path / "redis").mkdir()
    server = RedisServer(binaries()["bundled"], tmp_path / "redis")
    try:
        cluster = up("--redis-url", server.url)
        cluster.wait_ready()
        assert "redis ready" not in cluster.err.read_text()
        cluster.interrupt()
        assert cluster.wait() == 0
        assert server.admin.ping()
        cluster.assert_nothing_left()
    finally:
        server.stop()
