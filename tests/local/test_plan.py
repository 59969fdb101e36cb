from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.common.config import load_config
from kvferry.common.cores import NODE_ENVIRON, available_cores, available_memory_bytes
from kvferry.common.errors import ConfigError
from kvferry.services.local import gpus, plan
from kvferry.services.local.plan import claim_gateway_port, free_ports, gateway_program, gateway_url, node_programs


def config(**flags):
    return load_config({"redis_url": "redis://h/0", **flags}, environ={})


def test_nodes_have_names_and_ports_of_their_own():
    programs = node_programs(config(num_prefill=2, num_decode=2, num_both=1))
    assert [program.name for program in programs] == ["decode-0", "decode-1", "both-0", "prefill-0", "prefill-1"]
    loaded = [load_config(environ=program.environ) for program in programs]
    assert [each.node.node_id for each in loaded] == [program.name for program in programs]
    assert len({each.node.node_port for each in loaded}) == 5
    assert {each.cluster.redis_url for each in loaded} == {"redis://h/0"}


def test_given_ports_are_counted_up():
    programs = node_programs(config(num_decode=2, node_port=7000, metrics_port=9000))
    nodes = [load_config(environ=program.environ).node for program in programs]
    assert [(node.node_port, node.metrics_port) for node in nodes] == [(7000, 9000), (7001, 9001), (7002, 9002)]


def test_nodes_share_the_cores_and_prefill_yields_to_decode():
    programs = {program.name: program for program in node_programs(config(num_both=1))}
    assert programs["prefill-0"].niceness > programs["decode-0"].niceness == programs["both-0"].niceness == 0
    for program in programs.values():
        assert program.environ["GOMP_SPINCOUNT"] == NODE_ENVIRON["GOMP_SPINCOUNT"]
        assert program.environ["OMP_NUM_THREADS"] == str(max(1, available_cores() // 3))
        assert load_config(environ=program.environ).engine.num_threads == max(1, available_cores() // 3)
    [alone] = node_programs(config(num_prefill=0, num_decode=0, num_both=1))
    assert alone.environ["OMP_NUM_THREADS"] == str(available_cores())


def test_a_number_of_threads_that_was_asked_for_holds():
    [program, _] = node_programs(config(num_threads=3))
    assert program.environ["OMP_NUM_THREADS"] == "3"


def test_nodes_lend_each_other_cores_unless_a_number_of_threads_was_asked_for():
    board = Path("/run/cores")
    for flags, expected in (({}, "/run/cores"), ({"num_threads": 1}, None)):
        engines = [load_config(environ=each.environ).engine for each in node_programs(config(**flags), board)]
        assert [engine.core_board for engine in engines] == [expected] * 2


def test_each_has_longer_than_its_own_grace_period_to_drain():
    cluster = config(drain_s=7)
    assert all(program.grace_s > 7 for program in (*node_programs(cluster), gateway_program(cluster)))


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:81"), ("0.0.0.0", "http://127.0.0.1:81"), ("::", "http://[::1]:81")],
)
def test_the_url_is_one_to_connect_to(host, url):
    assert gateway_url(config(host=host, port=81)) == url


def test_port_0_becomes_a_free_one():
    assert claim_gateway_port(config(port=0)).gateway.port > 0


def test_an_address_that_is_not_ours_is_said():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        free_ports("192.0.2.1", 1)
    with pytest.raises(ConfigError, match="--port"):
        claim_gateway_port(config(host="192.0.2.1"))


@pytest.mark.parametrize(
    ("num_gpus", "environ", "expected"),
    [
        (0, {}, [(None, 0.9)] * 3),
        (1, {}, [("0", 0.3)] * 3),
        (2, {}, [("0", 0.45), ("1", 0.9), ("0", 0.45)]),
        (8, {}, [("0", 0.9), ("1", 0.9), ("2", 0.9)]),
        (2, {"CUDA_VISIBLE_DEVICES": "5, GPU-7"}, [("5", 0.45), ("GPU-7", 0.9), ("5", 0.45)]),
    ],
)
def test_nodes_take_gpus_in_turn_and_share_one_s_memory(num_gpus, environ, expected):
    placed = gpus.shared_out(config().engine, 3, num_gpus, environ)
    found = [(env.get("CUDA_VISIBLE_DEVICES"), round(engine.gpu_memory_utilization, 3)) for engine, env in placed]
    assert found == expected
    mirrors = [engine.kv_mirror_memory for engine, _ in placed]
    assert mirrors == [None] * 3 if not num_gpus else sum(mirrors) <= 0.6 * available_memory_bytes()


def test_a_node_is_told_its_gpu(monkeypatch):
    monkeypatch.setattr(plan, "num_gpus", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for program in node_programs(config(kv_mirror_memory=2**30)):
        assert program.environ["CUDA_VISIBLE_DEVICES"] == "0"
        engine = load_config(environ=program.environ).engine
        assert (engine.gpu_memory_utilization, engine.kv_mirror_memory) == (0.45, 2**30)
    on_cpu = node_programs(config(device="cpu"))
    assert not any("CUDA_VISIBLE_DEVICES" in program.environ for program in on_cpu)


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    assert gpus.num_gpus() == 0
