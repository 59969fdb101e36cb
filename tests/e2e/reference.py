"""What a lone node answers, and how tests wait for a cluster to come to rest.

Bounds that the product states are waited for `PATIENCE` times as long, because machines are slow.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from kvferry.common.nodes import NodeLoad
from tests.e2e.cluster import Gateway, Node

PATIENCE = 3
NOTICED_S = 3.0
"""A peer that is not heard of is given up after this."""
FREE_S = 10.0
"""Blocks pinned for a reader that is not heard of are free after this."""
RETURNED_S = 10.0
"""A node that has come back is used again after this."""

_SEEDS = itertools.count()


@dataclass(frozen=True)
class Reply:
    """All of an answer that two clusters must agree on."""

    text: str
    logprobs: tuple[float, ...]


Lone = Callable[..., Reply]
"""Of a prompt, and fields of the request."""


def new_prompt(num_tokens: int) -> list[int]:
    """One that no node has seen in this run of the tests."""
    return random.Random(f"prompt {next(_SEEDS)}").choices(range(3, 500), k=num_tokens)


def post(gateway: Gateway, prompt: list[int], timeout_s: float = 120, **fields: Any) -> httpx.Response:
    body = {"model": "test", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    return httpx.post(f"{gateway.url}/v1/completions", json=body | fields, timeout=timeout_s)


def ask(gateway: Gateway, prompt: list[int], timeout_s: float = 120, **fields: Any) -> Reply:
    response = post(gateway, prompt, timeout_s, **fields)
    assert response.status_code == httpx.codes.OK, response.text
    (choice,) = response.json()["choices"]
    return Reply(choice["text"], tuple(choice["logprobs"]["token_logprobs"]))


def wait_until(condition: Callable[[], bool], bound_s: float, what: str) -> None:
    deadline = time.monotonic() + bound_s * PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {bound_s * PATIENCE:.0f} s: {what}"
        time.sleep(0.02)


def wait_clean(*nodes: Node, bound_s: float = FREE_S) -> None:
    """No block has an owner there, and nothing is leased."""
    for node in nodes:
        wait_until(lambda node=node: _is_clean(node.record().load), bound_s, f"{node.name} owns nothing")


def wait_known(gateway: Gateway, node: Node) -> None:
    """The gateway knows the node as it is now."""
    instance = node.record().instance_id

    def is_known() -> bool:
        nodes: list[dict[str, Any]] = gateway.get("/cluster")["nodes"]
        return any(found["instance_id"] == instance and found["live"] for found in nodes)

    wait_until(is_known, RETURNED_S, f"the gateway knows {node.name}")


def wait_used(gateway: Gateway, decode: Node, lone: Lone, num_tokens: int) -> None:
    """Another node computes prompts for this decode node; each one on the way there is answered right."""
    prompt = new_prompt(num_tokens)
    want, before, salts = lone(prompt), num_received(decode), itertools.count()

    def is_used() -> bool:
        assert ask(gateway, prompt, cache_salt=f"try {next(salts)}") == want
        return num_received(decode) > before

    wait_until(is_used, RETURNED_S, "a prefill node is used")


def num_received(decode: Node, **labels: str) -> int:
    """Blocks that it has pulled from others."""
    return int(decode.metric("kvferry:transfer_blocks_total", **labels))


def _is_clean(load: NodeLoad) -> bool:
    idle = load.num_leases == load.num_running == load.num_waiting == 0
    return idle and load.accounts.available == load.accounts.total == load.num_blocks
