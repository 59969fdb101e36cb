"""Gateways tell each other through the index what they have just sent; no request waits for that or fails by it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence

import pytest
from prometheus_client import CollectorRegistry

from kvferry.common.errors import IndexUnavailable
from kvferry.common.hashing import block_names, root_name
from kvferry.common.nodes import Role
from kvferry.services.gateway.decision import decide_again
from kvferry.services.gateway.lookup import EXPECTED_GRACE_S, INDEX_PAUSE_S, MAX_EXPECTED_S, MAX_UNTOLD, PrefixLookup
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.plan import Plan, RouteRequest
from kvferry.services.gateway.router import choose
from kvferry.services.index.base import Matches
from kvferry.services.index.memory import MemoryIndex
from tests.gateway.fake_decode import CARD, Behaviour, FakeDecode
from tests.gateway.harness import Setup, eventually, gateway, run
from tests.gateway.test_nodes import Clock
from tests.gateway.test_router import node

PROMPT = list(range(20, 60)) * 10
NAMES = block_names(root_name(CARD.model_fingerprint, CARD.numerics_id), PROMPT, CARD.block_size)


class Told(MemoryIndex):
    """Remembers what it was told to expect; fails or hangs on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, float]] = []
        self.error: Exception | None = None
        self.hangs = False
        self.is_away = False

    async def expect(self, instance_id: str, names: Sequence[bytes], ttl_s: float) -> None:
        self.calls.append((instance_id, len(names), ttl_s))
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.Event().wait()
        await super().expect(instance_id, names, ttl_s)

    async def match(self, names: Sequence[bytes]) -> Matches:
        if self.is_away:
            raise IndexUnavailable("gone")
        return await super().match(names)


def test_two_gateways_send_a_new_prefix_where_either_has_just_sent_it() -> None:
    """No node holds anything, and none has told of any load."""

    async def scenario() -> None:
        index = Told()
        nodes = [FakeDecode(Behaviour(hang_after=0), node_id=f"d{number}") for number in range(8)]
        async with gateway(*nodes, index=index) as one, gateway(index=index) as other:
            asked = [asyncio.create_task(one.complete(PROMPT))]
            await eventually(lambda: any(node.submitted for node in nodes), 20)
            (computer,) = (node for node in nodes if node.submitted)
            await eventually(lambda: len(index.calls) == 1, 20)
            for number in range(2):
                body = {"model": "tiny", "prompt": [*PROMPT, *[number + 1] * 20]}
                headers = {"x-request-id": f"turn-{number}"}
                asked.append(asyncio.create_task(other.client.post("/v1/completions", json=body, headers=headers)))
                await eventually(lambda: sum(len(node.submitted) for node in nodes) == len(asked), 20)
            assert len(computer.submitted) == 3, "the second gateway does not know what the first has sent"
            line = (await other.client.get("/debug/route/turn-0")).json()["plans"][0]["decision"]
            assert line["matches"] == {}
            assert line["coming"] == {computer.instance_id: len(NAMES)}
            assert decide_again(line).is_same
            for task in asked:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("trouble", ["hangs", "fails", "is broken"])
def test_an_index_that_cannot_be_told_costs_no_request_anything(trouble: str) -> None:
    index = Told()
    index.hangs = trouble == "hangs"
    index.error = {"fails": IndexUnavailable("gone"), "is broken": ValueError("a bug")}.get(trouble)

    async def scenario(setup: Setup) -> None:
        for number in range(1, 4):
            assert (await setup.complete(PROMPT, max_tokens=1)).status_code == 200
            await eventually(lambda number=number: len(index.calls) == number)  # type: ignore[misc]
        if trouble != "is broken":
            await eventually(lambda: setup.metric("index_lookup_failures_total") == 3)

    run(gateway(FakeDecode(), index=index), scenario)


def test_a_prompt_is_expected_until_shortly_after_its_first_token_should_be_there() -> None:
    async def scenario(lookup: PrefixLookup, index: Told, clock: Clock) -> None:
        quick, slow = _plan({"i-p": 5}), _plan({}, num_waiting_tokens=10**6)
        for plan in (quick, slow):
            lookup.expect(plan, {CARD.naming: NAMES})
        await eventually(lambda: len(index.calls) == 2)
        assert 0 < quick.ttft_ms < 1000 * (MAX_EXPECTED_S - EXPECTED_GRACE_S) < slow.ttft_ms
        ends = [quick.ttft_ms / 1e3 + EXPECTED_GRACE_S, MAX_EXPECTED_S]
        told = zip((quick, slow), ends, strict=True)
        assert index.calls == [(plan.chosen.computed_by, len(NAMES), end) for plan, end in told]

    _with_a_lookup(scenario)


def test_nothing_is_told_that_is_held_or_while_the_index_is_left_alone_or_when_too_much_waits() -> None:
    async def scenario(lookup: PrefixLookup, index: Told, clock: Clock) -> None:
        lookup.expect(_plan({"i-p": len(NAMES), "i-d": len(NAMES)}), {CARD.naming: NAMES})
        lookup.expect(_plan({}), {})
        new = _plan({})
        for _ in range(MAX_UNTOLD + 10):  # at once: none of them is passed on in between
            lookup.expect(new, {CARD.naming: NAMES[:2]})
        await eventually(lambda: len(index.calls) == MAX_UNTOLD)
        assert {call[1] for call in index.calls} == {2}
        index.is_away = True
        lookup.expect(new, {CARD.naming: NAMES})  # and before it is passed on:
        assert await lookup.match([NAMES]) == Matches({}, {})
        lookup.expect(new, {CARD.naming: NAMES})
        await eventually(lookup._untold.empty)
        clock.now += INDEX_PAUSE_S
        lookup.expect(new, {CARD.naming: NAMES[:1]})
        await eventually(lambda: len(index.calls) > MAX_UNTOLD)
        assert [call[1] for call in index.calls[MAX_UNTOLD:]] == [1]

    _with_a_lookup(scenario)


def _plan(matches: Mapping[str, int], **load: float) -> Plan:
    nodes = [node("d", Role.DECODE, **load), node("p", Role.PREFILL, **load)]
    return choose(RouteRequest("r", len(PROMPT)), nodes, matches)


def _with_a_lookup(scenario: Callable[[PrefixLookup, Told, Clock], Awaitable[None]]) -> None:
    async def main() -> None:
        index, clock = Told(), Clock()
        lookup = PrefixLookup(index, 5.0, GatewayMetrics(CollectorRegistry()), clock)
        telling = asyncio.create_task(lookup.tell())
        await scenario(lookup, index, clock)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)

    asyncio.run(main())
