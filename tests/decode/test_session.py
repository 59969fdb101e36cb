"""What one gateway is sent: tokens packed where nothing else is to tell, and each request's in their order."""

from __future__ import annotations

import asyncio
import random

from kvferry.common.requests import FinishReason, GenerateRequest, RequestOutput, SamplingParams
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.decode.session import GatewaySession
from tests.decode.test_service import Node, never


def test_tokens_are_packed_and_other_outputs_are_not() -> None:
    session = GatewaySession()
    assert session.push_token(3, 0, 50)
    session.push(RequestOutput("r", index=1, token_ids=(51,), finish_reason=FinishReason.LENGTH), 3)
    assert session.push_token(5, 2, 52)
    step = session._take()
    assert (list(step.numbers), list(step.token_ids)) == ([3, 7], [50, 52])
    assert [output.index for output in step.outputs] == [1]
    assert session._take() == pb.StepOutputs()


def test_a_request_without_a_number_is_never_packed() -> None:
    """An older gateway gives none."""
    assert not GatewaySession().push_token(0, 0, 50)


def test_a_token_behind_an_output_of_its_request_goes_in_full_until_that_is_out() -> None:
    """Whichever choice's: the first output of a request tells of its prompt."""
    session = GatewaySession()
    session.push(RequestOutput("r", token_ids=(50,), cached_tokens=16), 3)
    assert not session.push_token(3, 0, 51)
    assert not session.push_token(3, 1, 51)
    assert session.push_token(5, 0, 51)
    session._take()
    assert session.push_token(3, 1, 51)


def test_each_request_has_its_tokens_in_order_whatever_is_packed() -> None:
    draw = random.Random(2)
    for _ in range(200):
        session, sent, came = GatewaySession(), [], []

        def read(step: pb.StepOutputs) -> list[tuple[int, int, int]]:
            """As a gateway reads it: request, choice and token, in order."""
            packed = zip(step.numbers, step.token_ids, strict=True)
            in_full = [(int(output.request_id), output.index, output.token_ids[0]) for output in step.outputs]
            return [(number // 10 * 10, number % 10, token_id) for number, token_id in packed] + in_full

        for token_id in range(30):
            number, index = draw.choice((10, 20)), draw.randrange(3)
            sent.append((number, index, token_id))
            if not (draw.random() < 0.7 and session.push_token(number, index, token_id)):
                session.push(RequestOutput(str(number), index=index, token_ids=(token_id,)), number)
            if draw.random() < 0.2:
                came += read(session._take())
        came += read(session._take())
        for request in (10, 20):
            assert [each for each in came if each[0] == request] == [each for each in sent if each[0] == request]


def test_only_tokens_with_nothing_else_to_tell_are_packed() -> None:
    """The first output tells of the prompt and the last one how it ended; in between, a number and a token do."""

    async def run() -> None:
        node, came = Node(never), []
        params = SamplingParams(max_tokens=5)
        node.service._submit(node.session, GenerateRequest("r", (7,) * 8, params, n=2, number=40))
        for _ in range(20):
            await asyncio.sleep(0)
            node.engine.step()
            if (step := node.session._take()).outputs or step.numbers:
                came.append(step)
        told = [[(o.index, bool(o.computed_tokens), o.finish_reason) for o in step.outputs] for step in came]
        assert told == [[(0, True, ""), (1, False, "")], [], [], [], [(0, False, "length"), (1, False, "length")]]
        assert [list(step.numbers) for step in came] == [[], [40, 41], [40, 41], [40, 41], []]

    asyncio.run(run())


def test_log_probabilities_that_were_asked_for_are_told() -> None:
    async def run() -> None:
        node, outputs = Node(never), []
        params = SamplingParams(max_tokens=4, logprobs=0)
        node.service._submit(node.session, GenerateRequest("r", (7,) * 8, params, number=40))
        for _ in range(20):
            await asyncio.sleep(0)
            node.engine.step()
            outputs += node.session._take().outputs
        assert [len(output.logprobs) for output in outputs] == [1] * 4

    asyncio.run(run())
