"""Tokens that a node sends under their choices' numbers are read like those that come in full."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvferry.common.requests import FinishReason, GenerateRequest, RequestOutput, ResumedChoice, SamplingParams
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.gateway.mailbox import Mailbox
from kvferry.services.gateway.sessions import Session, Submission
from kvferry.services.rpc.convert import output_to_pb
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, events, gateway, run, text_of
from tests.gateway.test_router import node
from tests.gateway.tiny_tokenizer import tiny_tokenizer


@pytest.mark.parametrize("packs", [True, False])
def test_each_choice_reads_its_own_tokens_whether_they_are_packed_or_not(packs: bool) -> None:
    texts = ["Hello wörld 🧑‍🚀", "The quick brown fox"]
    ids = [tiny_tokenizer().encode(text) for text in texts]

    async def scenario(setup: Setup) -> None:
        stream = events((await setup.complete("x", n=2, max_tokens=len(ids[0]) + 1, stream=True)).text)
        assert [text_of(stream, index) for index in (0, 1)] == texts
        assert setup.nodes[0].num_packed == (sum(map(len, ids)) if packs else 0), "all but the two that stop"

    behaviour = Behaviour(tokens=lambda request, index: ids[index], stop_token_id=0, packs=packs)
    run(gateway(FakeDecode(behaviour)), scenario)


class Call:
    """A session's stream on which these messages come."""

    def __init__(self, *steps: pb.StepOutputs) -> None:
        self._steps = list(steps)

    async def read(self) -> Any:
        return pb.SessionReply(outputs=self._steps.pop(0)) if self._steps else grpc.aio.EOF


def a_session() -> Session:
    def dial(address: str) -> Any:
        raise AssertionError("nobody is called")

    return Session(node("d"), 1.0, dial)


def submitted(session: Session, mailbox: Mailbox, request_id: str, n: int, *resumed: int) -> Submission:
    had = tuple(ResumedChoice(index, (1,)) for index in resumed)
    return session.submit(GenerateRequest(request_id, (1, 2), SamplingParams(), n=n, resumed=had), mailbox)


async def outputs_of(mailbox: Mailbox) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(output.request_id, output.index, output.token_ids) for output in await mailbox.take()]


def test_numbers_are_of_one_choice_in_one_session_alone() -> None:
    async def scenario() -> None:
        session, mailbox = a_session(), Mailbox()
        numbers = [*submitted(session, mailbox, "a", 2).numbers, *submitted(session, mailbox, "b", 3).numbers]
        assert len(set(numbers)) == 5
        assert 0 not in numbers
        await session._read(Call(pb.StepOutputs(numbers=reversed(numbers), token_ids=range(5))))
        assert await outputs_of(mailbox) == [
            ("b", 2, (0,)),
            ("b", 1, (1,)),
            ("b", 0, (2,)),
            ("a", 1, (3,)),
            ("a", 0, (4,)),
        ]

    asyncio.run(scenario())


def test_tokens_of_nobody_are_dropped() -> None:
    """Of a choice that has ended, of one that is not wanted any more, or was not asked for, and of no request."""

    async def scenario() -> None:
        session, mailbox = a_session(), Mailbox()
        ended, cancelled = submitted(session, mailbox, "a", 2), submitted(session, mailbox, "b", 2)
        gone, partly = submitted(session, mailbox, "c", 1), submitted(session, mailbox, "d", 2, 1)
        last = output_to_pb(RequestOutput("a", token_ids=(9,), finish_reason=FinishReason.LENGTH))
        cancelled.cancel(0)
        gone.cancel()
        numbers = [*ended.numbers, *cancelled.numbers, *gone.numbers, *partly.numbers, 1000]
        step = pb.StepOutputs(numbers=numbers, token_ids=range(len(numbers)))
        await session._read(Call(pb.StepOutputs(outputs=[last]), step))
        assert await outputs_of(mailbox) == [("a", 0, (9,)), ("a", 1, (1,)), ("b", 1, (3,)), ("d", 1, (6,))]
        for submission in (ended, cancelled, partly):
            submission.cancel()
        assert not session._by_number

    asyncio.run(scenario())


def test_packed_tokens_come_before_the_outputs_of_their_message() -> None:
    async def scenario() -> None:
        session, mailbox = a_session(), Mailbox()
        (number,) = submitted(session, mailbox, "a", 1).numbers
        last = output_to_pb(RequestOutput("a", token_ids=(9,), finish_reason=FinishReason.LENGTH))
        await session._read(Call(pb.StepOutputs(outputs=[last], numbers=[number], token_ids=[8])))
        assert await outputs_of(mailbox) == [("a", 0, (8,)), ("a", 0, (9,))]
        assert session.num_requests == 0

    asyncio.run(scenario())
