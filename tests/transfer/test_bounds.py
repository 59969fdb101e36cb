"""How long the other side's trouble may last, on the virtual clock and between the two real services."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.common.errors import Draining, Internal, Overloaded, Unavailable
from kvferry.common.fail_points import FailPoints
from kvferry.common.nodes import Role
from kvferry.common.requests import GenerateRequest, SamplingParams
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.rpc.convert import output_from_pb
from kvferry.services.transfer import shm
from kvferry.services.transfer.protocol import OwnerSide
from tests.engine.fake_runner import generate
from tests.transfer import sim
from tests.transfer.sim import BLOCK, SLOT_BYTES, SimNode
from tests.transfer.virtual import VirtualLoop
from tests.transfer.wire import Wire

POOL = 14
PROMPT = tuple(random.Random(1).choices(range(50), k=41))  # ten blocks to receive


class Pair:
    def __init__(self, transports: tuple[str, ...]) -> None:
        self.transport = transports[0]
        self.loop, self.wire = VirtualLoop(), Wire()
        self.prefill = SimNode(Role.PREFILL, self.loop, self.wire, POOL, transports)
        self.decode = SimNode(Role.DECODE, self.loop, self.wire, 4 * POOL, transports)
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

    def exchange(self) -> None:
        """Until no message is in flight, and the owner has read what it was asked for."""
        while lanes := self.wire.lanes():
            for found in lanes:
                self.decode.call(self.wire.deliver, *found)
            self.prefill.copy()

    def pulled(self, what: str, transport: str = "") -> float:
        return self.decode.sample(f"transfer_{what}", transport=transport or self.transport)

    def start_a_hand_over(self) -> None:
        """Until some blocks are pinned for the reader, and others are still to come."""
        self.submit("r")
        while not self.prefill.leases.counts().num_pins:
            self.go_on(copy=False)
        assert self.prefill.engine.load().accounts.sequence

    def cancel(self, request_id: str = "r") -> None:
        if request := self.decode.service._requests.get((self.decode.session.number, request_id, 0)):
            self.decode.service._cancel(request, [0])

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
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Over gRPC, or the transports that the test is parametrized with."""
    sim.COPIES_WAIT = True
    pair = Pair(getattr(request, "param", ("grpc",)))
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
    assert pair.prefill.sample("leases_expired_total") == 1


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
    pair.decode.call(pair.cancel)
    pair.decode.copy()
    pair.decode.step()
    assert pair.decode.engine.load().accounts.available == pair.decode.pool.num_blocks
    for call, lane in pair.wire.lanes():
        while lane is call.up and lane.in_flight:
            pair.decode.call(pair.wire.deliver, call, lane)
    pair.prefill.step()
    assert pair.prefill.engine.load().accounts.available == POOL
    assert pair.prefill.leases.num_open == 0


@pytest.mark.parametrize("turns", range(6))
def test_a_second_cancel_cuts_nothing_short(pair: Pair, turns: int) -> None:
    """A deadline may pass while a cancelled receive ends."""
    pair.start_a_hand_over()
    receiving = pair.decode.service._requests[pair.decode.session.number, "r", 0].receiving

    def cancel_again(left: int) -> None:
        if left:
            pair.loop.call_soon(cancel_again, left - 1)
        else:
            receiving.cancel()

    pair.decode.call(lambda: (pair.cancel(), cancel_again(turns)))
    pair.decode.copy()
    pair.decode.step()
    assert pair.decode.engine.load().accounts.available == pair.decode.pool.num_blocks
    pair.exchange()
    pair.prefill.step()
    assert pair.prefill.engine.load().accounts.available == POOL
    assert pair.prefill.leases.num_open == pair.decode.service.num_active == 0


@pytest.fixture
def clock(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the nodes measure with is the virtual clock, too."""
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 1000.0 + pair.loop.now)


@pytest.mark.usefixtures("clock")
def test_the_time_from_cancel_to_free_lasts_until_the_copy_under_way_has_ended(pair: Pair) -> None:
    pair.submit("r")
    while not len(pair.decode.jobs):
        pair.go_on(copy=False)
        pair.prefill.copy()
    pair.decode.call(pair.decode.jobs.begin)
    pair.decode.call(pair.cancel)
    pair.loop.advance(0.5)
    pair.decode.step()
    assert pair.decode.engine.load().accounts.incoming
    assert pair.decode.sample("cancel_to_free_seconds_count") == 0
    pair.decode.copy()
    pair.decode.step()
    assert not pair.decode.engine.load().accounts.incoming
    assert pair.decode.sample("cancel_to_free_seconds_count") == 1
    assert pair.decode.sample("cancel_to_free_seconds_sum") == 0.5


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_the_time_from_cancel_to_free_lasts_until_the_running_step_has_ended(pair: Pair, role: Role) -> None:
    node = pair.prefill if role is Role.PREFILL else pair.decode
    pair.submit("r")
    while not node.engine.scheduler.running:
        pair.go_on()

    def client_leaves() -> None:
        node.runner.during = None
        pair.decode.call(pair.cancel)
        for call, lane in pair.wire.lanes():
            while lane is call.up and lane.in_flight:
                pair.decode.call(pair.wire.deliver, call, lane)
        pair.loop.advance(0.5)

    node.runner.during = client_leaves
    node.engine.step()
    pair.loop.settle()
    assert node.engine.load().accounts.available == node.pool.num_blocks
    assert node.sample("cancel_to_free_seconds_count") == 1
    assert node.sample("cancel_to_free_seconds_sum") == 0.5


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


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("pair", [("shm",), ("grpc",)], indirect=True)
def test_blocks_are_copied_while_later_ones_are_computed_and_only_the_wait_for_the_last_is_exposed(pair: Pair) -> None:
    """Each copy takes 0.25 s, the next two blocks are computed after it; the last ones have nothing to hide behind."""
    pair.submit("r")
    num_copied: list[float] = []
    while not pair.ended:
        pair.exchange()
        while len(pair.decode.jobs):
            pair.decode.call(pair.decode.jobs.begin)
            pair.loop.advance(0.25)
            pair.decode.copy()
            pair.exchange()
        num_copied += [pair.pulled("blocks_total")] if pair.prefill.engine.scheduler.running else []
        pair.go_on(copy=False)
    assert pair.got["r"] == generate(PROMPT, 3)
    assert num_copied == [2, 4, 6, 8], "before the owner had computed the last ones"
    assert pair.pulled("blocks_total") == 10
    assert pair.pulled("bytes_total") == 10 * BLOCK * SLOT_BYTES
    assert (pair.pulled("seconds_count"), pair.pulled("seconds_sum")) == (5, 5 * 0.25)
    assert pair.decode.sample("transfer_exposed_seconds_total") == 0.25


def test_the_last_copy_is_exposed_also_when_the_event_loop_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As shared memory is copied in life: before anything that came behind the offer has been read."""
    pair = Pair(("shm",))
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: 1000.0 + pair.loop.now)
    copy_pieces = shm.copy_pieces

    def take_a_quarter_second(*arguments: Any) -> Iterator[None]:
        pair.loop.now += 0.25
        return copy_pieces(*arguments)

    monkeypatch.setattr(shm, "copy_pieces", take_a_quarter_second)
    try:
        pair.submit("r")
        pair.go_on(30)
        assert pair.got["r"] == generate(PROMPT, 3)
        assert (pair.pulled("seconds_count"), pair.pulled("seconds_sum")) == (5, 5 * 0.25)
        assert pair.decode.sample("transfer_exposed_seconds_total") == 0.25
    finally:
        for node in (pair.prefill, pair.decode):
            node.die(half_open=True)
        pair.loop.close()


REFUSALS = (Overloaded("full"), Unavailable("not now"), Draining("leaving"), Internal("a bug"))


@pytest.mark.parametrize("how", [*(error.code for error in REFUSALS), "breaks", "closes", "refuses connections"])
def test_a_prefill_that_has_failed_is_waited_for_by_nobody(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Whatever it says, or if it says nothing and goes: no clock has to move until the prompt is computed here."""

    def refuse(*_: object) -> None:
        raise next(error for error in REFUSALS if error.code == how)

    async def leave(*_: object) -> None:
        if how == "breaks":
            raise RuntimeError("a bug")

    if how == "refuses connections":
        del pair.wire.hosts[pair.prefill.address]
    else:
        name, does = ("_run", leave) if how in ("breaks", "closes") else ("_open_prompt", refuse)
        monkeypatch.setattr(pair.prefill.service, name, does)
    pair.submit("r")
    pair.go_on(20)
    assert pair.got["r"] == generate(PROMPT, 3)
    assert pair.loop.now == 0.0
    assert pair.decode.sample("prefill_fallback_total", cause="all_candidates_failed") == 1
    load = pair.decode.engine.load()
    assert load.num_running == load.num_waiting == pair.decode.service.num_active == 0
    assert load.accounts.available == load.num_blocks


@pytest.mark.parametrize("number", [1, 2, 6, 7], ids=["accepted", "filled", "last filled", "computed"])
def test_a_reply_that_says_something_else_ends_the_hand_over_at_once(pair: Pair, number: int) -> None:
    pair.prefill.service._node.fail_points = FailPoints(f"rpc.prefill.reply=corrupt@{number}")
    pair.submit("r")
    pair.go_on(30)
    assert pair.got["r"] == generate(PROMPT, 3)
    assert pair.loop.now == 0.0
    assert sum(pair.prefill.service._node.fail_points.hits.values()) == 1
    assert pair.decode.sample("prefill_fallback_total", cause="all_candidates_failed") == 1
    assert pair.decode.sample("prompt_tokens_by_source_total", source="external_kv_transfer") == 0


def test_a_renewal_that_tells_of_more_replies_than_came_ends_the_hand_over_at_once(pair: Pair) -> None:
    pair.start_a_hand_over()
    pair.exchange()
    pair.prefill.service._node.fail_points = FailPoints("rpc.prefill.reply=corrupt@1")
    pair.loop.advance(2.0)
    pair.exchange()
    assert sum(pair.prefill.service._node.fail_points.hits.values()) == 1
    assert pair.decode.sample("transfer_failures_total", cause="transfer_failed") == 1
    pair.go_on(20)
    assert pair.got["r"] == generate(PROMPT, 3)


class Torn:
    """A transport that has opened, and fails from now on."""

    async def pull(self, *_: object) -> None:
        raise OSError(5, "I/O error")

    def drop(self, instance_id: str) -> None: ...

    async def aclose(self) -> None: ...


@pytest.mark.parametrize("pair", [("shm", "grpc")], indirect=True)
def test_a_transport_that_fails_in_mid_hand_over_costs_the_request_nothing(pair: Pair) -> None:
    pair.submit("r")
    while not pair.pulled("blocks_total"):
        pair.go_on()
    pair.decode._puller.transports_by_name["shm"] = Torn()  # type: ignore[assignment]
    pair.go_on(30)
    assert pair.got["r"] == generate(PROMPT, 3)
    assert (pair.pulled("blocks_total"), pair.pulled("blocks_total", "grpc")) == (2, 8)
    assert pair.decode.sample("transport_failures_total", transport="shm", cause="transfer_failed") == 1
    assert pair.decode.sample("prefill_fallback_total", cause="all_candidates_failed") == 0
    assert pair.decode.sample("prompt_tokens_by_source_total", source="external_kv_transfer") == 10 * BLOCK
    (link,) = pair.decode._puller.links
    assert (link.transport, link.reason) == ("grpc", "shm: failed: [Errno 5] I/O error")


def test_what_a_failed_hand_over_has_pulled_is_counted_and_so_is_the_failure(pair: Pair) -> None:
    pair.submit("r")
    while not pair.pulled("blocks_total"):
        pair.go_on()
    pair.wire.crash(pair.prefill.instance, half_open=False)
    pair.go_on(20)
    assert pair.got["r"] == generate(PROMPT, 3)
    assert (pair.pulled("blocks_total"), pair.pulled("bytes_total")) == (2, 2 * BLOCK * SLOT_BYTES)
    assert pair.pulled("seconds_count") == 1
    assert pair.decode.sample("transfer_failures_total", cause="unavailable") == 1
    assert pair.decode.sample("prefill_fallback_total", cause="all_candidates_failed") == 1
    assert pair.decode.sample("prompt_tokens_by_source_total", source="external_kv_transfer") == 0


@pytest.mark.parametrize("pair", [("shm",), ("grpc",)], indirect=True)
def test_nothing_that_was_copied_is_used_when_the_owner_answers_that_the_lease_had_ended(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else has gone well: no error came, every checksum is right, and the answer comes in time."""
    release = OwnerSide.release

    def too_late(side: OwnerSide) -> bool:
        pair.prefill.clock_skew_s += 9.0
        return release(side)

    monkeypatch.setattr(OwnerSide, "release", too_late)
    pair.submit("r")
    pair.go_on(60)
    assert pair.got["r"] == generate(PROMPT, 3)
    assert pair.pulled("blocks_total") == 10
    assert pair.decode.sample("transfer_failures_total", cause="lease_expired") == 1
    assert pair.decode.sample("prompt_tokens_by_source_total", source="external_kv_transfer") == 0
    assert pair.decode.sample("prompt_tokens_by_source_total", source="local_compute") == len(PROMPT)


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
