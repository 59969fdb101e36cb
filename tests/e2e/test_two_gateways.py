"""Two gateways over one cluster and one Redis, behind a plain load balancer; one is killed under its streams, and only
their clients notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.common.hashing import block_names, root_name
from kvferry.services.index.open import open_index
from tests.e2e import test_resume
from tests.e2e.cluster import Node, cluster
from tests.e2e.proxy import Balancer
from tests.e2e.streams import Stream, Streams, ask, running
from tests.e2e.test_resume import Fixture

NUM_EVENTS = 12  # of each stream before the kill
PATIENCE_S = 60.0  # for what takes milliseconds on a quiet machine


def bodies(salt: str) -> list[dict[str, Any]]:
    """Of each kind whose prompt may come out of a cache: greedy, drawn with penalties, three choices, stop strings."""
    kinds = test_resume.bodies(salt)
    return [kinds[number] for number in (0, 1, 3, 5)]


def test_the_other_one_goes_on_and_finds_what_the_dead_ones_requests_left(tiny_model: Path, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(cluster(tmp_path, str(tiny_model)))
        fleet = Fixture(nodes, 2, "--cached-pull", "always", prefill_flags=("--cached-pull", "always"))
        dies, lives = fleet.gateway, nodes.start_gateway()
        balancer = stack.enter_context(Balancer((dies.port, lives.port)))
        want = ask(balancer.url, bodies("before"))
        assert balancer.num_connections[dies.port] > 0 < balancer.num_connections[lives.port]

        async def run() -> list[Stream]:
            async with running(lives.url, bodies("living")) as others:
                lost = Streams(dies.url, bodies("dead"))
                following = asyncio.create_task(lost.run())
                await lost.begun(NUM_EVENTS)
                await others.begun(NUM_EVENTS)
                dies.send(signal.SIGKILL)
                with pytest.raises(ExceptionGroup):
                    await following
                assert not any(stream.done for stream in (*lost.all, *others.all)), "too short: this tests nothing"
                num_choices = sum(body.get("n", 1) for body in bodies("dead"))
                await asyncio.to_thread(_until_aborted, fleet.decode, num_choices)
            return others.all

        assert [stream.told for stream in asyncio.run(run())] == want
        assert lives.metric("kvferry:request_resumes_total") == lives.metric("kvferry:request_errors_total") == 0
        dies.stop(signal.SIGKILL)
        fleet.check_settled(fleet.prefill, *fleet.decode)
        asyncio.run(_until_known(nodes.redis_url, fleet.prefill, bodies("dead")))
        again = ask(balancer.url, bodies("dead"))
        assert [choices for choices, _ in again] == [choices for choices, _ in want]
        assert [usage["prompt_tokens_details"]["cached_tokens"] for _, usage in again] == [
            _num_full_tokens(body["prompt"]) for body in bodies("dead")
        ]
        fleet.check_settled(fleet.prefill, *fleet.decode)


def _num_full_tokens(prompt: Sequence[int]) -> int:
    """In full blocks before the last token, which is always computed."""
    return (len(prompt) - 1) // 16 * 16


def _until_aborted(decode: Sequence[Node], num_choices: int) -> None:
    """Nobody has told the nodes but the sessions that broke."""
    deadline = time.monotonic() + PATIENCE_S
    while sum(node.metric("kvferry:request_success_total", finished_reason="abort") for node in decode) < num_choices:
        assert time.monotonic() < deadline, "the dead gateway's requests go on"
        time.sleep(0.02)


async def _until_known(redis_url: str, node: Node, wanted: Sequence[dict[str, Any]]) -> None:
    """The nodes tell the index in batches: waits for the last one, without touching a cache."""
    card, index = node.record().card, open_index(redis_url, timeout_s=10)
    deadline = time.monotonic() + PATIENCE_S
    try:
        for body in wanted:
            root = root_name(card.model_fingerprint, card.numerics_id, body["cache_salt"])
            names = block_names(root, body["prompt"], card.block_size)
            while max((await index.match(names)).held.values(), default=0) < _num_full_tokens(body["prompt"]) // 16:
                assert time.monotonic() < deadline, "the index does not know of the dead gateway's prompts"
                await asyncio.sleep(0.02)
    finally:
        await index.aclose()
