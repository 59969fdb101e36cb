"""How long the other side's trouble may last, on the virtual clock and between the two real services."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.common.nodes import Role
from kvferry.common.requests import GenerateRequest, SamplingParams
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.rpc.convert import output_from_pb
from tests.engine.fake_runner import generate
from tests.transfer import sim
from tests.transfer.sim import SimNode
from tests.transfer.virtual import VirtualLoop
from tests.transfer.wire import Wire

POOL = 14
PROMPT = tuple(random.Random(1).choices(range(50), k=41))  # ten blocks to receive


class Pair:
    def __init__(self) -> None:
        self.loop, self.wire = VirtualLoop(), Wire()
        self.prefill = SimNode(Role.PREFILL, self.loop, self.wire, POOL, ("grpc",))
        self.decode = SimNode(Role.DECODE, self.loop, self.wire, 4 * POOL, ("grpc",))
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}

    def submit(self, request_id: str, prompt: tuple[int, ...] = PROMPT) -> None:
        params = SamplingParams(max_tokens=3)
        spec = GenerateRequest(request_id, prompt, params, prefill=(self.prefill.candidate,))
        self.decode.call(self.decode.service._submit, self.decode.session, spec)

    def go_on(self, rounds: int = 1, *, copy: bool = True, step: bool = True) -> None:
        for _ in range(rounds):
            for found in self.wire.lanes():
                self.decode.call(self.wire.deliver, *found)
            for node in (self.prefill, self.decode):
                if copy:
                    node.copy()
                if step:
                    node.step()
        outputs, self.decode.session._pending = self.decode.session._pending, []
        for output in map(output_from_pb, outputs):
            self.got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output.finish_reason.value

    def start_a_hand_over(self) -> None:
        """Until some blocks are pinned for the reader, and others are still to come."""
        self.submit("r")
        while not self.prefill.leases.counts().num_pins:
            self.go_on(copy=False)
        assert self.prefill.engine.load().accounts.sequence

    def pass_time(self, seconds: float, *, frozen: SimNode) -> None:
        """The other node lives on: messages, steps, its look at the leases."""
        other = self.decode if frozen is self.prefill else self.prefill
        for _ in range(round(seconds / 0.25)):
            self.loop.advance(0.25)
            other.sweep()
            for call, lane in self.wire.lanes():
                if frozen.instance not in (call.client, call.server):
                    self.decode.call(self.wire.deliver, call, lane)
            other.copy()
            other.step()


@pytest.fixture
def pair() -> Iterator[Pair]:
    sim.COPIES_WAIT = True
    pair = Pair()
    yield pair
    for node in (pair.prefill, pair.decode):
        node.die(half_open=True)
    pair.loop.close()
    sim.COPIES_WAIT = False


def test_a_dead_writer_is_noticed_within_three_seconds_and_the_prompt_is_computed_here(pair: Pair) -> None:
    """On a half-open network, where nothing is heard of its death."""
    pair.start_a_hand_over()
    pair.wire.crash(pair.prefill.instance, half_open=True)
    assert pair.decode.engine.load().accounts.incoming
    pair.pass_time(3.25, frozen=pair.prefill)
    assert not pair.decode.engine.load().accounts.incoming
    pair.go_on(20)
    assert pair.got["r"] == generate(PROMPT, 3)
    assert pair.ended == {"r": "length"}


def test_a_killed_readers_blocks_are_free_within_ten_seconds_on_a_half_open_network(pair: Pair) -> None:
    pair.start_a_hand_over()
    pair.wire.crash(pair.decode.instance, half_open=True)
    pair.pass_time(7.0, frozen=pair.decode)
    assert pair.prefill.leases.num_open == 1, "a reader that may still live has lost its lease"
    pair.pass_time(3.0, frozen=pair.decode)
    assert pair.prefill.engine.load().accounts.available == POOL
    assert pair.prefill.leases.num_open == pair.prefill.service.num_active == 0


def test_a_readers_blocks_are_free_at_once_when_its_connection_breaks(pair: Pair) -> None:
    pair.start_a_hand_over()
    pair.decode.die(half_open=False)
    pair.go_on(1, copy=False, step=False)
    pair.prefill.step()
    assert pair.prefill.engine.load().accounts.available == POOL


@pytest.mark.parametrize("rounds", range(8))
def test_a_cancelled_requests_blocks_are_free_within_one_message_and_one_step(pair: Pair, rounds: int) -> None:
    pair.submit("r")
    pair.go_on(rounds)

    def cancel() -> None:
        if request := pair.decode.service._requests.get((pair.decode.session.number, "r", 0)):
            pair.decode.service._cancel(request, [0])

    pair.decode.call(cancel)
    pair.decode.copy()
    pair.decode.step()
    assert pair.decode.engine.load().accounts.available == pair.decode.pool.num_blocks
    for call, lane in pair.wire.lanes():
        while lane is call.up and lane.in_flight:
            pair.decode.call(pair.wire.deliver, call, lane)
    pair.prefill.step()
    assert pair.prefill.engine.load().accounts.available == POOL
    assert pair.prefill.leases.num_open == 0


@pytest.mark.parametrize("seed", range(5))
def test_prompts_that_together_exceed_the_prefill_pool_never_wait_for_each_other(pair: Pair, seed: int) -> None:
    """Ten blocks each in a pool of fourteen, three at once, whatever the order in which things move on."""
    rng = random.Random(seed)
    prompts = {f"r{i}": tuple(rng.choices(range(50), k=41)) for i in range(3)}
    for request_id, prompt in prompts.items():
        pair.submit(request_id, prompt)
    for _ in range(300):
        pair.go_on(copy=rng.random() < 0.5, step=rng.random() < 0.5)
        if len(pair.ended) == len(prompts):
            break
    assert pair.got == {request_id: generate(prompt, 3) for request_id, prompt in prompts.items()}
    assert not pair.loop.now, "a wait had to end before they moved on"


@pytest.mark.parametrize("lost", ["computed", "release"])
def test_a_message_that_is_lost_is_missed_within_three_seconds(pair: Pair, lost: str) -> None:
    """Or its reader would wait for as long as the owner lives."""
    pair.submit("r")
    while not _lose(pair, lost):
        pair.go_on()
    for _ in range(13):
        pair.loop.advance(0.25)
        pair.go_on(2)
    assert not pair.decode.engine.load().accounts.incoming
    pair.go_on(20)
    assert pair.got["r"] == generate(PROMPT, 3)


def _lose(pair: Pair, field: str) -> bool:
    """Once a message of that kind is in flight."""
    for call, lane in pair.wire.lanes("Run"):
        kind: Any = pb.PrefillReply if lane is call.down else pb.PrefillRequest
        for item in lane.in_flight:
            if item[0] == "message" and kind.FromString(item[1]).WhichOneof("message") == field:
                lane.in_flight.remove(item)
                return True
    return False
