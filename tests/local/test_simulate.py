"""The simulated cluster keeps its accounts, tells the router what its pools hold, and knows more from more nodes."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import random
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.errors import ConfigError
from kvferry.services.gateway.plan import InFlight
from kvferry.services.local.cli import main
from kvferry.services.local.simulate.cluster import Fleet, Simulation
from kvferry.services.local.simulate.command import simulate
from kvferry.services.local.simulate.cores import LINGER_S, Cores
from kvferry.services.local.simulate.node import Pool
from kvferry.services.local.simulate.policies import POLICIES, Choice, Snapshot
from kvferry.services.local.simulate.profile import load_profile
from kvferry.services.local.simulate.trace import MEAN_INPUT, MEAN_OUTPUT, Request, load_trace, reuse, synthetic

PROFILE = load_profile().faster(40.0, 2048)


def test_the_synthetic_load_has_the_published_shape() -> None:
    loads = [synthetic("mooncake", 4000, 1.0, seed) for seed in range(3)]
    requests = [request for load in loads for request in load]
    assert sum(r.num_tokens for r in requests) / len(requests) == pytest.approx(MEAN_INPUT, rel=0.1)
    assert sum(r.num_output for r in requests) / len(requests) == pytest.approx(MEAN_OUTPUT, rel=0.1)
    assert sum(map(reuse, loads)) / 3 == pytest.approx(0.40, abs=0.04)
    assert all(len(r.blocks) == r.num_tokens // 512 for r in requests)


def test_nine_in_ten_requests_of_the_adversarial_load_share_one_prefix() -> None:
    requests = synthetic("hot", 1000, 1.0)
    hot = [r for r in requests if r.blocks and r.blocks[0].startswith(b"hot")]
    assert 850 < len(hot) < 950
    assert len({r.blocks[:16] for r in hot}) == 1
    assert len({r.blocks[16] for r in hot if len(r.blocks) > 16}) > 500, "what follows is everyone's own"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", [Fleet(2, 2), Fleet(0, 0, 3), Fleet(2, 1, blocks_per_node=260)], ids=str)
def test_every_request_ends_and_nothing_is_left_behind(fleet: Fleet, policy: str) -> None:
    """The third fleet's pools are so small that nearly every request evicts something."""
    requests = synthetic("mooncake", 80, 0.3, seed=3)
    sim = Simulation(fleet, PROFILE, POLICIES[policy])
    asyncio.run(sim.run(requests))
    assert len(sim.served) == len(requests)
    assert all(s.request.at_s < s.first_at_s <= s.ended_at_s for s in sim.served)
    assert sim.ledger.in_flight == {}
    for node in sim.nodes.values():
        assert (node.pool.num_held, len(node.prompts), len(node.waiting), node.num_streams) == (0, 0, 0, 0)
        assert node.pool.num_cached <= node.pool.num_blocks
        for request in requests:
            found = asyncio.run(sim.index.match(request.blocks)).held
            assert found.get(node.record.instance_id, 0) == node.pool.match(request.blocks)


def test_the_same_seed_gives_the_same_figures() -> None:
    requests = synthetic("chat", 60, 3.0)
    first, again = (simulate(Fleet(2, 1), PROFILE, "kvferry", requests, seed=5) for _ in range(2))
    assert first == again
    assert first != simulate(Fleet(2, 1), PROFILE, "kvferry", requests, seed=6)


def test_a_lone_request_takes_what_its_steps_take() -> None:
    profile = load_profile()
    quiet = type(profile)(**{name: getattr(profile, name) for name in profile.__slots__} | {"noise": (1.0,)})
    request = Request(0, 0.0, 512, 3, ())
    result = simulate(Fleet(1, 1, bytes_per_s=1e15), quiet, "kvferry", [request])
    chunks = [quiet.expected_ms(256, 256 * start + 256 * 128, 0, 0) for start in (0, 256)]
    assert result.ttft_mean_ms == pytest.approx(sum(chunks) + 5.0 + quiet.expected_ms(0, 0, 1, 512), rel=1e-6)
    assert result.itl_mean_ms == pytest.approx(quiet.expected_ms(0, 0, 1, 513), rel=0.01)


def test_nodes_that_share_a_core_wait_for_each_other() -> None:
    requests = [Request(n, 0.0, 2000, 2, ()) for n in range(4)]
    own = simulate(Fleet(0, 0, 4), PROFILE, "round robin", requests)
    shared = simulate(Fleet(0, 0, 4, cores=1), PROFILE, "round robin", requests)
    assert shared.ttft_mean_ms > 2 * own.ttft_mean_ms


def test_a_node_that_computes_alone_is_lent_a_core_and_prefill_nodes_give_way() -> None:
    """Four seconds of work. Times by hand: shares of two cores, and a moment before a core is lent."""
    now, ended = [0.0], dict[str, float]()
    events: list[tuple[float, int, Callable[[], None]]] = []
    serial = itertools.count()
    cores = Cores(2, lambda: now[0], lambda at_s, event: heapq.heappush(events, (at_s, next(serial), event)))

    def compute(node: str, weight: float) -> None:
        cores.compute(node, 4.0, 2.0, weight, lambda _: ended.update({node: now[0]}))

    def run_until_idle() -> None:
        while events:
            now[0], _, event = heapq.heappop(events)
            event()

    compute("alone", 1.0)
    run_until_idle()
    assert ended == {"alone": 2.0}
    now[0] = 10.0
    compute("p", 0.25)
    compute("d0", 1.0)
    compute("d1", 1.0)
    run_until_idle()
    # of two cores the decode nodes get 8/9 each, the prefill node 2/9: 4.5 s; what it has left then, 3 s, it computes
    # alone, on one core for as long as the others keep theirs
    assert ended["d0"] == ended["d1"] == pytest.approx(14.5)
    assert ended["p"] == pytest.approx(14.5 + LINGER_S + (3.0 - LINGER_S) / 2)


def test_what_is_computed_is_found_by_who_waits_behind_it() -> None:
    """Two requests with one prompt of four blocks: the second waits for the first and computes its last block alone."""
    blocks = tuple(bytes([n]) for n in range(4))
    requests = [Request(n, 0.001 * n, 2048, 2, blocks) for n in range(2)]
    sim = Simulation(Fleet(1, 1), PROFILE.faster(1.0, 512), POLICIES["kvferry"])
    asyncio.run(sim.run(requests))
    assert [served.cached_blocks for served in sim.served] == [0, 3]


def test_what_is_computed_is_found_by_who_pulled_blocks_and_waits_behind_it() -> None:
    """The first turn is on another node. Two more come at once: both pull its blocks, one computes for the other."""
    blocks = tuple(bytes([n]) for n in range(4))
    requests = [Request(0, 0.0, 1100, 2, blocks[:2]), *(Request(n, 9.0, 2500 + n, 2, blocks[:4]) for n in (1, 2))]

    def placed(request: Request, seen: Snapshot, _: random.Random) -> Choice:
        computes = f"i-p00{min(request.number, 1)}"
        return Choice("i-d000", computes, seen[2].enter("i-d000", computes, InFlight(1, request.num_tokens)))

    sim = Simulation(Fleet(2, 1), PROFILE.faster(1.0, 512), placed)
    asyncio.run(sim.run(requests))
    assert [served.cached_blocks for served in sim.served] == [0, 2, 4]


def test_more_nodes_serve_sooner_and_ours_sooner_than_chance() -> None:
    requests = synthetic("hot", 200, 1.5, seed=1)
    few, many = (simulate(Fleet(n, n), PROFILE, "kvferry", requests) for n in (2, 6))
    assert many.ttft_mean_ms < few.ttft_mean_ms
    chance = simulate(Fleet(2, 2), PROFILE, "random", requests)
    assert few.ttft_mean_ms < chance.ttft_mean_ms
    assert few.ttft_p99_ms < chance.ttft_p99_ms


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=40), st.randoms(use_true_random=False))
def test_a_pool_keeps_chains_whole_from_their_beginning(uses: list[tuple[int, int]], rng: random.Random) -> None:
    pool, mirror = Pool(12), set[bytes]()
    for chain, length in uses:
        names = tuple(bytes([chain, position]) for position in range(length))
        evicted = pool.reserve(length)
        assert evicted is not None
        mirror -= set(evicted)
        stored, evicted = pool.release(length, names)
        mirror = (mirror | set(stored)) - set(evicted)
        assert pool.num_cached == len(mirror) <= 12
        assert all(bytes([c, p - 1]) in mirror for c, p in mirror if p), "no block without its parent"


def test_a_trace_file_is_read_and_stretched(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * n, "input_length": 1300, "output_length": 5, "hash_ids": [7, n, n]} for n in range(4)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests = load_trace(file, rate=4.0)
    assert [r.at_s for r in requests] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert len(requests[0].blocks) == 2, "the third block is not full"
    assert requests[0].blocks[0] == requests[3].blocks[0] != requests[0].blocks[1]
    file.write_text('{"timestamp": 1}\n')
    with pytest.raises(ConfigError, match=r"line 1: KeyError: 'input_length'"):
        load_trace(file)


def test_the_command_compares_fleets_and_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, figures = tmp_path / "plot.svg", tmp_path / "figures.json"
    flags = ["--nodes", "1+1,2", "--rate", "2", "--requests", "30", "--shape", "chat", "--speed", "40"]
    assert main(["simulate", *flags, "--plot", str(svg), "--json", str(figures)]) == 0
    said = capsys.readouterr().out
    assert "1+1" in said
    assert "2 both" in said
    assert ET.fromstring(svg.read_text()).tag.endswith("svg")
    assert [row["fleet"] for row in json.loads(figures.read_text())] == ["1+1", "2 both"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes", "0+0"], "write 6+10 for prefill and decode nodes"),
        (["--policy", "best"], "no policy 'best': there are random"),
        (["--profile", "nothing"], "no profile 'nothing': there are smollm2-cpu"),
        (["--trace", "nowhere"], "trace nowhere: No such file"),
        (["--blocks", "1"], "a node has 1 (--blocks)"),
        (["--blocks", "0"], "--blocks 0: must be more than 0"),
        (["--rate", "0"], "--rate 0: one or several numbers above 0"),
        (["--rate", "x"], "--rate x: one or several numbers above 0"),
        (["--speed", "0"], "--speed 0.0: must be more than 0"),
        (["--requests", "0"], "--requests 0: must be more than 0"),
    ],
)
def test_what_cannot_be_simulated_is_said(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *flags]) == 2
    assert said in capsys.readouterr().err
