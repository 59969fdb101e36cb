"""A prefill node on one host, decode node and gateway on another, Redis on a third, and what happens on the wires.

The hosts share no memory, so `shm`, which is allowed everywhere here, must find that out by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, Node, cluster
from tests.e2e.reference import (
    NOTICED_S,
    Lone,
    ask,
    new_prompt,
    num_received,
    wait_clean,
    wait_known,
    wait_until,
    wait_used,
)
from tests.netns.network import Network, missing, network
from tests.tiny_model import TinyShape, write_tiny_model

pytestmark = [
    pytest.mark.skipif(bool(why := missing()), reason=why),
    pytest.mark.timeout(300),
]

NUM_TOKENS = 1800
NUM_BLOCKS = (NUM_TOKENS - 1) // 16
SHAPE = TinyShape(num_layers=8, num_kv_heads=6, head_dim=64, max_position_embeddings=2048)
BLOCK_BYTES = 16 * SHAPE.num_layers * 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 4
"""0.4 MB: a prompt is 44 MB."""
SLOW = "100mbit"
POOL = ("--num-blocks-override", "400")


class Hosts:
    def __init__(self, made: Network, nodes: Cluster, transports: str, *, own_memory: bool = True) -> None:
        self.transport = transports.split(",")[-1 if own_memory else 0]
        self.a = made.add_host("a", own_memory=own_memory)
        self.b = made.add_host("b", own_memory=own_memory)
        self.r = made.add_host("r")
        nodes.redis_host = self.r.address
        nodes.start_redis(on=self.r.on)
        flags = ("--node-host", "0.0.0.0", "--transports", transports, *POOL)
        self.prefill: Node = nodes.start_node(
            "prefill", *flags, "--advertise-host", self.a.address, on=self.a.on, wait=False
        )
        self.decode: Node = nodes.start_node(
            "decode", *flags, "--advertise-host", self.b.address, "--local-prefill-max-tokens", "16",
            on=self.b.on, wait=False,
        )  # fmt: skip
        nodes.wait_node(self.prefill)
        nodes.wait_node(self.decode)
        self.gateway = nodes.start_gateway("--host", "0.0.0.0", on=self.b.on)
        wait_known(self.gateway, self.prefill)

    @property
    def num_received(self) -> int:
        return num_received(self.decode, transport=self.transport)

    @property
    def num_fallbacks(self) -> int:
        return int(self.decode.metric("kvferry:prefill_fallback_total"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("wide") / "model", shape=SHAPE)


@pytest.fixture(scope="module")
def lone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lone]:
    """What a node alone on a machine answers."""
    with cluster(tmp_path_factory.mktemp("lone"), str(model)) as nodes:
        nodes.start_node("both", "--no-enable-prefix-caching", *POOL)
        gateway = nodes.start_gateway()
        yield lambda prompt: ask(gateway, prompt)


@contextlib.contextmanager
def three_hosts(folder: Path, model: Path, transports: str, **options: bool) -> Iterator[Hosts]:
    with network() as made:
        nodes = Cluster(folder, str(model))
        try:
            yield Hosts(made, nodes, transports, **options)
        finally:
            nodes.stop()


@pytest.fixture(params=["grpc", "ucx"])
def hosts(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """`shm` is allowed on both sides, and must not come about."""
    if request.param == "ucx" and find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed: pip install 'kvferry[ucx]'")
    with three_hosts(tmp_path, model, f"shm,{request.param}") as made:
        yield made


def test_a_prompt_crosses_between_hosts_and_gives_a_lone_nodes_bits(hosts: Hosts, lone: Lone) -> None:
    """All there is started and serves without a way to the internet."""
    assert hosts.a.reaches(hosts.b.address)
    assert not any(host.reaches("192.0.2.1") for host in (hosts.a, hosts.b, hosts.r))
    prompt, sent = new_prompt(NUM_TOKENS), hosts.a.sent_bytes
    assert ask(hosts.gateway, prompt) == lone(prompt)
    assert hosts.num_received == NUM_BLOCKS
    assert num_received(hosts.decode, transport="shm") == 0, "one host was taken for two"
    assert hosts.a.sent_bytes - sent > NUM_BLOCKS * BLOCK_BYTES, "the blocks took another way than the link"
    assert hosts.num_fallbacks == 0
    wait_clean(hosts.prefill, hosts.decode)


def test_two_that_share_memory_use_it_though_they_have_networks_of_their_own(
    model: Path, tmp_path: Path, lone: Lone
) -> None:
    """That it is the memory which keeps the hosts of the other tests from `shm`."""
    with three_hosts(tmp_path, model, "shm,grpc", own_memory=False) as hosts:
        prompt, sent = new_prompt(NUM_TOKENS), hosts.a.sent_bytes
        assert ask(hosts.gateway, prompt) == lone(prompt)
        assert hosts.num_received == NUM_BLOCKS
        assert hosts.a.sent_bytes - sent < BLOCK_BYTES


def test_over_a_link_that_loses_packets_the_bits_are_the_same(hosts: Hosts, lone: Lone) -> None:
    prompt = new_prompt(NUM_TOKENS)
    want = lone(prompt)
    hosts.a.lose("400mbit")
    assert ask(hosts.gateway, prompt) == want
    assert hosts.num_received == NUM_BLOCKS
    assert hosts.num_fallbacks == 0
    assert hosts.a.num_lost > 0, "nothing was lost"
    wait_clean(hosts.prefill, hosts.decode)


def test_over_a_slow_link_blocks_cross_while_later_ones_are_computed(hosts: Hosts, lone: Lone) -> None:
    prompt, sent, overlapped = new_prompt(NUM_TOKENS), hosts.a.sent_bytes, False
    want = lone(prompt)
    hosts.a.limit(SLOW)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, hosts.gateway, prompt)
        while not answer.done():
            is_computing = hosts.prefill.record().load.num_running > 0
            overlapped |= is_computing and hosts.a.sent_bytes - sent > 2 * BLOCK_BYTES
    assert answer.result() == want
    assert overlapped, "no block crossed before the whole prompt was computed"
    assert hosts.num_received == NUM_BLOCKS
    wait_clean(hosts.prefill, hosts.decode)


@pytest.mark.parametrize("how", ["silence", "cut"])
def test_a_link_lost_in_mid_pull_costs_one_silence_and_the_next_prompts_use_the_node_again(
    hosts: Hosts, lone: Lone, how: str
) -> None:
    """3 s until the reader gives up, 10 s until the owner's blocks are free; the answer is the right one."""
    prompt, during, sent = new_prompt(NUM_TOKENS), new_prompt(NUM_TOKENS), hosts.a.sent_bytes
    want, want_during = lone(prompt), lone(during)
    hosts.a.limit(SLOW)
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(ask, hosts.gateway, prompt)
        wait_until(lambda: hosts.a.sent_bytes - sent > 20 * BLOCK_BYTES, 20, "the pull is in its middle")
        assert hosts.decode.record().load.accounts.incoming, "the pull was over before the link was lost"
        assert hosts.prefill.record().load.num_leases == 1
        getattr(hosts.a, how)()
        wait_until(lambda: not hosts.decode.record().load.accounts.incoming, NOTICED_S, "the reader gives up")
        wait_clean(hosts.prefill)
        assert answer.result() == want
    assert hosts.num_fallbacks == 1
    assert ask(hosts.gateway, during) == want_during
    wait_clean(hosts.decode)
    hosts.a.restore()
    hosts.a.limit("10gbit")
    wait_used(hosts.gateway, hosts.decode, lone, NUM_TOKENS)
    wait_clean(hosts.prefill, hosts.decode)


@pytest.mark.parametrize("how", ["silence", "cut"])
def test_requests_go_on_while_redis_is_out_of_reach(hosts: Hosts, lone: Lone, how: str) -> None:
    prompts = [new_prompt(NUM_TOKENS) for _ in range(3)]
    want = [lone(prompt) for prompt in prompts]
    getattr(hosts.r, how)()
    wait_until(lambda: not hosts.gateway.get("/cluster")["index"]["ok"], 10, "the gateway misses Redis")
    assert [ask(hosts.gateway, prompt) for prompt in prompts] == want
    assert hosts.num_received == len(prompts) * NUM_BLOCKS, "the prefill node was forgotten"
    hosts.r.restore()
    wait_until(lambda: bool(hosts.gateway.get("/cluster")["index"]["ok"]), 10, "Redis is back")
    wait_used(hosts.gateway, hosts.decode, lone, NUM_TOKENS)
    wait_clean(hosts.prefill, hosts.decode)
