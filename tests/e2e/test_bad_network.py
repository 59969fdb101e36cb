"""A network between two nodes that is slow, or half open: connections stand, and nothing comes through."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.cluster import Gateway, Node, cluster, free_port
from tests.e2e.proxy import ADDRESS, Proxy
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

LENGTH = 1800
NUM_BLOCKS = (LENGTH - 1) // 16


@dataclass
class Behind:
    """A prefill node behind a proxy, a decode node and a gateway in front of it."""

    proxy: Proxy
    prefill: Node
    decode: Node
    gateway: Gateway


@pytest.fixture
def behind(tiny_model: Path, tmp_path: Path) -> Iterator[Behind]:
    port = free_port()
    with Proxy(port) as proxy, cluster(tmp_path, str(tiny_model)) as nodes:
        flags = ("--transports", "grpc")
        prefill = nodes.start_node("prefill", *flags, "--advertise-host", ADDRESS, port=port, wait=False)
        decode = nodes.start_node("decode", *flags, "--local-prefill-max-tokens", "16")
        nodes.wait_node(prefill)
        gateway = nodes.start_gateway()
        wait_known(gateway, prefill)
        yield Behind(proxy, prefill, decode, gateway)


def test_a_network_with_long_delays_gives_the_same_bits(behind: Behind, lone: Lone) -> None:
    wait_used(behind.gateway, behind.decode, lone, LENGTH)  # the first connection is made without
    behind.proxy.delay_s = 0.1
    prompt, before = new_prompt(LENGTH), num_received(behind.decode)
    assert ask(behind.gateway, prompt) == lone(prompt)
    assert num_received(behind.decode) == before + NUM_BLOCKS
    assert behind.decode.metric("kvferry:prefill_fallback_total") == 0
    wait_clean(behind.prefill, behind.decode)


@pytest.mark.parametrize("when", ["before the hand-over", "in its middle"])
def test_a_half_open_network_costs_one_silence_on_either_side(behind: Behind, lone: Lone, when: str) -> None:
    prompt, second = new_prompt(LENGTH), new_prompt(LENGTH)
    want, want_second = lone(prompt), lone(second)
    wait_used(behind.gateway, behind.decode, lone, LENGTH)
    wait_clean(behind.prefill, behind.decode)
    with ThreadPoolExecutor(1) as thread:
        behind.proxy.delay_s = 0.02
        if when == "before the hand-over":
            behind.proxy.swallow()
        sent = behind.proxy.num_bytes
        answer = thread.submit(ask, behind.gateway, prompt)
        wait_until(lambda: behind.decode.record().load.accounts.incoming > 0, 10.0, "the hand-over has begun")
        if when == "in its middle":
            wait_until(lambda: behind.proxy.num_bytes - sent > 2**17, 10.0, "some bytes have come")
            behind.proxy.swallow()
            assert behind.decode.record().load.accounts.incoming, "the hand-over was over before"
        wait_until(lambda: not behind.decode.record().load.accounts.incoming, NOTICED_S, "the reader gives up")
        wait_clean(behind.prefill)
        assert answer.result() == want
    assert ask(behind.gateway, second) == want_second
    assert behind.decode.metric("kvferry:prefill_fallback_total") == 2
    wait_clean(behind.decode)
    behind.proxy.delay_s = 0.0
    behind.proxy.restore()
    wait_used(behind.gateway, behind.decode, lone, LENGTH)
    wait_clean(behind.prefill, behind.decode)
