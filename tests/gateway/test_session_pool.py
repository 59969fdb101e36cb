"""Sessions that end before they have begun."""

from __future__ import annotations

import asyncio

from kvferry.common.requests import FinishReason, GenerateRequest, SamplingParams
from kvferry.services.gateway.mailbox import Mailbox
from kvferry.services.gateway.sessions import SessionPool
from tests.gateway.test_router import node


def test_a_session_given_up_before_its_task_began_ends_its_requests_and_is_not_kept() -> None:
    request = GenerateRequest(request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams())

    async def run() -> None:
        async with SessionPool(1.0) as pool, asyncio.timeout(5):
            mailbox = Mailbox()
            pool.submit(node("d"), request, mailbox)
            pool.give_up(["i-d"])
            (output,) = await mailbox.take()
            assert output.finish_reason is FinishReason.ERROR
            assert output.error_code == "node_lost"
            assert not pool.sessions

    asyncio.run(run())
