"""Submissions that go on where another node was lost: only new tokens are sent, whatever way their blocks come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.common.errors import Unavailable
from kvferry.common.requests import BeamParams, GenerateRequest, ResumedChoice, SamplingParams
from kvferry.services.node.reader import Wanted
from kvferry.services.rpc.convert import submit_from_pb, submit_to_pb
from tests.decode.test_service import PLAN, Node, never
from tests.engine.fake_runner import generate

PROMPT = (7,) * 200


async def refuse(*_: Any) -> Any:
    raise Unavailable("nobody there")


def had(index: int, num_tokens: int) -> ResumedChoice:
    return ResumedChoice(index, tuple(generate(PROMPT, num_tokens, 100 * index)))


def request(*resumed: ResumedChoice, n: int = 1, **fields: Any) -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 20} | fields))
    made = GenerateRequest("r", PROMPT, params, n=n, attempt=1, prefill=PLAN, resumed=resumed)
    return submit_from_pb(submit_to_pb(made))


def tokens(node: Node) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {}
    for output in node.session._pending:
        assert output.attempt == 1
        got.setdefault(output.index, []).extend(output.token_ids)
    return got


def test_a_submission_travels_with_all_that_its_choices_have_had() -> None:
    made = request(had(2, 3), ResumedChoice(0), n=3)
    assert made.resumed == (had(2, 3), ResumedChoice(0, ()))


@pytest.mark.parametrize(
    "choices",
    [[had(0, 12)], [had(2, 12)], [had(0, 3), had(2, 19)], [had(3, 1), had(1, 17), had(2, 0)]],
    ids=["alone", "alone, not the first", "two", "three, unordered"],
)
def test_only_the_rest_of_the_choices_named_is_produced(choices: list[ResumedChoice]) -> None:
    async def run() -> None:
        node = Node(refuse)
        node.service._submit(node.session, request(*choices, n=4))
        for _ in range(8):
            await node.settle()
        want = {c.index: generate(PROMPT, 20, 100 * c.index)[len(c.token_ids) :] for c in choices}
        assert tokens(node) == want
        assert sorted(node.endings) == [(index, "length", "") for index in sorted(want)]
        assert node.service.num_active == 0
        assert node.engine.load().accounts.available == 64

    asyncio.run(run())


@pytest.mark.parametrize(("choices", "num_asked"), [([had(1, 30)], 230), ([had(1, 30), had(2, 4)], 200)])
def test_a_peer_is_asked_for_what_comes_before_the_branches(
    choices: list[ResumedChoice], num_asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Wanted] = []

    async def copying(_node: Any, _request: Any, wanted: Wanted) -> int:
        asked.append(wanted)
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr("kvferry.services.decode.service.receive", copying)

    async def run() -> None:
        node = Node(never)
        node.service._submit(node.session, request(*choices, n=3, max_tokens=50))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        incoming = (num_asked - 1) // 16
        assert node.engine.load().accounts.incoming == incoming
        assert [wanted.prompt_token_ids for wanted in asked] == [(*PROMPT, *choices[0].token_ids)[:num_asked]]
        node.service._cancel(node.service._requests[node.session.number, "r", 1], [c.index for c in choices])
        assert node.engine.load().accounts.incoming == incoming, "blocks were given back while a copy was in flight"
        await node.settle()
        assert node.engine.load().accounts.available == 64
        assert node.service.num_active == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (request(had(0, 20)), "none is left"),
        (request(had(1, 3)), "below n"),
        (request(had(0, 3), had(0, 4), n=2), "different"),
        (request(ResumedChoice(0, (512,))), "outside the vocabulary"),
        (request(had(0, 3), n=2, beam=BeamParams()), "beam"),
        (request(ResumedChoice(0, (5,) * 824), max_tokens=2000), "none is left"),
    ],
    ids=["all tokens", "no such choice", "twice", "vocabulary", "beams", "context"],
)
def test_what_cannot_go_on_is_one_error(made: GenerateRequest, says: str) -> None:
    async def run() -> None:
        node = Node(never)
        node.service._submit(node.session, made)
        (output,) = node.session._pending
        assert output.error.code == "bad_request"
        assert says in output.error.message
        assert node.service.num_active == 0

    asyncio.run(run())


def test_what_still_runs_at_the_end_of_a_drain_is_handed_back_in_one_event_each() -> None:
    async def run() -> None:
        node = Node(refuse)
        node.service._submit(node.session, request(had(0, 3), had(1, 2), n=2, max_tokens=500))
        await node.settle()
        assert len(tokens(node)) == 2
        await node.service.aclose()
        assert node.endings == [(0, "error", "draining")]
        await node.settle()
        assert node.engine.load().accounts.available == 64

    asyncio.run(run())
