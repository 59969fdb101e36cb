"""A prefill node that answers with every kind of failure. It speaks the protocol, and computes nothing.

What a prefill node says of the *prompt* is the client's answer. What it says of itself, or does not say, is none of the
client's business: the prompt is computed elsewhere.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvferry.common.errors import (
    BadRequest,
    ContextTooLong,
    DeadlineExceeded,
    Draining,
    Internal,
    KvferryError,
    ModelNotFound,
    Overloaded,
    Unavailable,
)
from kvferry.common.nodes import NodeRecord, Role
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.index.open import open_index
from kvferry.services.rpc.convert import card_to_pb
from kvferry.services.rpc.errors import detail_to_pb
from tests.e2e.cluster import Gateway, Node, cluster
from tests.e2e.reference import Lone, ask, new_prompt, post, wait_clean

LENGTH = 300


class Refuser(pb_grpc.BlocksServicer, pb_grpc.PrefillServicer, pb_grpc.NodeServicer):
    """`answer` is an error to reply with, or one of the words of `_misbehave`."""

    def __init__(self, like: NodeRecord, port: int) -> None:
        self.answer: KvferryError | str = "end"
        self.num_asked = 0
        self.over = threading.Event()
        self.record = replace(
            like, instance_id="refuser", node_id="refuser", role=Role.PREFILL, address=f"127.0.0.1:{port}"
        )

    def Stats(self, request: Any, context: Any) -> pb.StatsReply:  # noqa: N802
        return pb.StatsReply(record_json=self.record.to_json())

    def Handshake(self, request: Any, context: Any) -> pb.HandshakeReply:  # noqa: N802
        card = card_to_pb(self.record.card)
        return pb.HandshakeReply(card=card, instance_id="refuser", num_blocks=1000, transports=["grpc"])

    def Run(self, requests: Any, context: grpc.ServicerContext) -> Iterator[pb.PrefillReply]:  # noqa: N802
        self.num_asked += 1
        next(requests)
        if isinstance(self.answer, KvferryError):
            yield pb.PrefillReply(error=detail_to_pb(self.answer))
            return
        if self.answer.startswith("accept"):
            accepted = pb.PrefillAccepted(lease_id="1" * 32, instance_id="refuser", num_blocks=(LENGTH - 1) // 16)
            yield pb.PrefillReply(accepted=accepted)
        if self.answer.endswith("abort"):
            context.abort(grpc.StatusCode.UNKNOWN, "what was that?")
        if self.answer.endswith("say nothing"):
            self.over.wait(600)


class Fixture:
    def __init__(self, decode: Node, gateway: Gateway, refuser: Refuser) -> None:
        self.decode, self.gateway, self.refuser = decode, gateway, refuser


@pytest.fixture(scope="module")
def refusing(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    with cluster(tmp_path_factory.mktemp("refusing"), str(tiny_model)) as nodes:
        decode = nodes.start_node("decode", "--local-prefill-max-tokens", "16")
        server = grpc.server(ThreadPoolExecutor(8))
        port = server.add_insecure_port("127.0.0.1:0")
        refuser = Refuser(decode.record(), port)
        pb_grpc.add_BlocksServicer_to_server(refuser, server)
        pb_grpc.add_PrefillServicer_to_server(refuser, server)
        pb_grpc.add_NodeServicer_to_server(refuser, server)
        server.start()
        asyncio.run(_announce(nodes.redis_url, refuser.record))
        gateway = nodes.start_gateway()
        try:
            yield Fixture(decode, gateway, refuser)
        finally:
            refuser.over.set()
            server.stop(None).wait(10)


async def _announce(redis_url: str, record: NodeRecord) -> None:
    index = open_index(redis_url, timeout_s=5.0)
    await index.announce(record, 3600)
    await index.aclose()


@pytest.mark.parametrize(
    "error",
    [BadRequest("no such prompt, please"), ContextTooLong("longer than I like it", param="prompt")],
    ids=lambda error: error.code,
)
def test_what_a_prefill_node_says_of_the_prompt_reaches_the_client_with_its_status(
    refusing: Fixture, error: KvferryError
) -> None:
    refusing.refuser.answer = error
    asked = refusing.refuser.num_asked
    reply = post(refusing.gateway, new_prompt(LENGTH))
    assert reply.status_code == error.http_status == 400
    body = reply.json()["error"]
    assert (body["message"], body["code"], body["param"]) == (error.message, error.code, error.param)
    assert refusing.refuser.num_asked == asked + 1
    wait_clean(refusing.decode)


@pytest.mark.parametrize(
    "answer",
    [
        Overloaded("too much to do"),
        Unavailable("not now"),
        Draining("leaving"),
        DeadlineExceeded("too late"),
        Internal("a bug"),
        ModelNotFound("never heard of it"),
        "end",
        "abort",
        "say nothing",
        "accept, then end",
        "accept, then abort",
        "accept, then say nothing",
    ],
    ids=lambda answer: answer if isinstance(answer, str) else answer.code,
)
def test_what_a_prefill_node_says_of_itself_costs_the_client_nothing_but_time(
    refusing: Fixture, lone: Lone, answer: KvferryError | str
) -> None:
    """One silence, 3 s, at most."""
    refusing.refuser.answer = answer
    asked, prompt = refusing.refuser.num_asked, new_prompt(LENGTH)
    fallbacks = refusing.decode.metric("kvferry:prefill_fallback_total")
    assert ask(refusing.gateway, prompt, timeout_s=30) == lone(prompt)
    assert refusing.refuser.num_asked == asked + 1, "it was not asked: this tests nothing"
    assert refusing.decode.metric("kvferry:prefill_fallback_total") == fallbacks + 1
    wait_clean(refusing.decode)
