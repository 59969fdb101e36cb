"""The decode service over a real engine with a runner that computes nothing, and a peer that never answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.common.config import Config
from kvferry.common.errors import BadRequest, Unavailable
from kvferry.common.nodes import LayoutCard, Role
from kvferry.common.requests import GenerateRequest, PrefillCandidate, SamplingParams
from kvferry.services.decode.receive import local_prefill_limit
from kvferry.services.decode.service import DecodeService
from kvferry.services.decode.session import GatewaySession
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.outputs import StepReport
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence
from kvferry.services.node.context import LoadedNode, NodeContext
from kvferry.services.node.metrics import NodeMetrics
from kvferry.services.rpc.convert import submit_from_pb, submit_to_pb
from kvferry.services.transfer.lease import LeaseTable
from tests.engine.fake_runner import FakeRunner, generate

CARD = LayoutCard("model", "numerics", "float32", 16, 1, 1, 16, "0")
PLAN = (PrefillCandidate("p0", "127.0.0.1:1"),)


class Peer:
    """Stands for the puller: `connect` does what the test says."""

    def __init__(self, connect: Any) -> None:
        self.connect = connect
        self.dropped: list[str] = []

    def drop(self, instance_id: str) -> None:
        self.dropped.append(instance_id)


class Node:
    """A decode service with its engine; `steps` runs the engine until it has nothing to do."""

    def __init__(self, connect: Any) -> None:
        loop = asyncio.get_running_loop()
        scheduler = Scheduler(BlockPool(64), SchedulerLimits(8, 64, 8))
        self.engine = Engine(
            FakeRunner(64, 16), scheduler, (), 1024, lambda report: loop.call_soon(self._on_report, report)
        )
        self.peer = Peer(connect)
        leases = LeaseTable(self.engine.pin, self.engine.unpin, lease_s=8.0)
        context = NodeContext(Config(), Role.DECODE, "d0", "instance")
        model: Any = SimpleNamespace(vocab_size=512)
        puller: Any = self.peer
        grammars: Any = None
        self.metrics = metrics = NodeMetrics(self.engine.load)
        context.loaded = LoadedNode(self.engine, CARD, model, 1024, leases, puller, metrics, grammars, True)
        self.service = DecodeService(context)
        self.session = GatewaySession()

    def _on_report(self, report: StepReport) -> None:
        self.metrics.note_step(report)
        self.service.on_report(report)

    def submit(self, n: int = 1, length: int = 200, request_id: str = "r", **fields: Any) -> None:
        params, fields = SamplingParams(max_tokens=4), {"prefill": PLAN} | fields
        spec = GenerateRequest(request_id, (7,) * length, params, n=n, **fields)
        self.service._submit(self.session, submit_from_pb(submit_to_pb(spec)))

    def num_fallbacks(self, cause: str) -> float | None:
        return self.metrics.registry.get_sample_value("kvferry:prefill_fallback_total", {"cause": cause})

    def cancel(self, request_id: str = "r") -> None:
        if request := self.service._requests.get((self.session.number, request_id, 0)):
            self.service._cancel(request, sorted(request.open))

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)
            self.engine.step()
        self.engine.check()

    @property
    def endings(self) -> list[tuple[int, str, str]]:
        return [(o.index, o.finish_reason, o.error.code) for o in self.session._pending if o.finish_reason]


async def never(*_: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("ticks", range(6))
def test_cancel_at_any_moment_of_a_receive_gives_everything_back(ticks: int, n: int) -> None:
    async def run() -> None:
        node = Node(never)
        node.submit(n)
        for _ in range(ticks):
            await asyncio.sleep(0)
        node.cancel()
        await node.settle()
        accounts = node.engine.load().accounts
        assert accounts.available == accounts.total, accounts
        assert node.endings == []
        assert node.service.num_active == 0
        num_freed = node.metrics.registry.get_sample_value("kvferry:cancel_to_free_seconds_count")
        assert num_freed == 1, "the choices of one prompt have its blocks together"

    asyncio.run(run())


def test_choices_that_are_cancelled_one_by_one_end_the_receive_with_the_last() -> None:
    async def run() -> None:
        node = Node(never)
        node.submit(n=3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        request = node.service._requests[node.session.number, "r", 0]
        for index in (0, 2, 1):
            assert node.engine.load().accounts.incoming > 0
            node.service._cancel(request, [index])
        await node.settle()
        assert node.engine.load().accounts.available == 64

    asyncio.run(run())


@pytest.mark.parametrize("answers", ["never", "refuses"])
def test_a_choice_that_is_cancelled_before_its_prompt_has_blocks_takes_none_of_the_others_along(answers: str) -> None:
    """The first one, whose sequence is to receive the prompt for all of them."""

    async def refuse(*_: Any) -> Any:
        raise Unavailable("nobody there")

    async def run() -> None:
        node = Node(never if answers == "never" else refuse)
        others = node.engine.pool.allocate(60)
        node.submit(n=2)
        await node.settle()
        request = node.service._requests[node.session.number, "r", 0]
        node.service._cancel(request, [0])
        await node.settle()
        node.engine.pool.release(others)
        await node.settle()
        if answers == "never":
            assert node.engine.load().accounts.incoming > 0
            assert node.service.num_active == 2, "nobody fills the blocks that were admitted"
            node.service._cancel(request, [1])
            await node.settle()
        else:
            assert node.endings == [(1, "length", "")]
        assert node.service.num_active == 0
        assert node.engine.load().accounts.available == 64

    asyncio.run(run())


def test_failing_peers_leave_the_prompt_to_this_node() -> None:
    async def refuse(*_: Any) -> Any:
        raise Unavailable("nobody there")

    async def run() -> None:
        node = Node(refuse)
        node.submit()
        await node.settle()
        tokens = [t for o in node.session._pending for t in o.token_ids]
        assert tokens == generate((7,) * 200, 4)
        assert node.endings == [(0, "length", "")]
        assert node.peer.dropped == ["p0"]
        assert (node.num_fallbacks("all_candidates_failed"), node.num_fallbacks("no_candidate")) == (1, 0)
        assert node.engine.load().accounts.available == 64

    asyncio.run(run())


@pytest.mark.parametrize(
    ("length", "by_choice", "num_fallbacks"),
    [(200, False, 1), (200, True, 0), (20, False, 0)],
    ids=["no prefill node", "the router prefers this node", "short"],
)
def test_only_a_long_prompt_for_want_of_a_prefill_node_counts_as_a_fallback(
    length: int, by_choice: bool, num_fallbacks: int
) -> None:
    async def run() -> None:
        node = Node(never)
        node.submit(length=length, prefill=(), local_by_choice=by_choice)
        await node.settle()
        assert node.endings == [(0, "length", "")]
        assert node.num_fallbacks("no_candidate") == num_fallbacks
        assert node.num_fallbacks("all_candidates_failed") == 0

    asyncio.run(run())


def test_refusal_by_a_peer_is_the_clients_answer() -> None:
    async def refuse(*_: Any) -> Any:
        raise BadRequest("the prompt is not to its taste")

    async def run() -> None:
        node = Node(refuse)
        node.submit(n=2)
        await node.settle()
        assert node.endings == [(0, "error", "bad_request")]
        assert node.engine.load().accounts.available == 64

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokens", "code"),
    [((), "bad_request"), ((7,) * 1024, "context_length_exceeded"), ((512,), "bad_request")],
    ids=["empty", "too long", "outside the vocabulary"],
)
def test_bad_submissions_end_with_one_error_and_take_nothing(tokens: tuple[int, ...], code: str) -> None:
    async def run() -> None:
        node = Node(never)
        node.service._submit(node.session, GenerateRequest("r", tokens, SamplingParams()))
        await node.settle()
        assert node.endings == [(0, "error", code)]
        assert node.engine.load().accounts.available == 64

    asyncio.run(run())


def test_a_request_id_in_use_is_refused_and_the_first_one_lives() -> None:
    async def run() -> None:
        node = Node(never)
        node.submit(length=20)
        node.submit(length=20)
        await node.settle()
        assert sorted(node.endings) == [(0, "error", "bad_request"), (0, "length", "")]

    asyncio.run(run())


def test_a_decode_node_where_prompt_tokens_wait_computes_no_more_of_them_than_it_must() -> None:
    async def run() -> None:
        node = Node(never)
        context = node.service._node
        node.engine.scheduler.times.note(64, 0, 10.0)
        assert local_prefill_limit(context) == 640, "as many tokens as fit into a step of 100 ms"
        for number, limit in ((500, 140), (300, CARD.block_size)):
            params = SamplingParams(max_tokens=1)
            node.engine.submit(Sequence(str(number), [number] * number, number, b"root", 16, params))
            assert local_prefill_limit(context) == limit

    asyncio.run(run())
