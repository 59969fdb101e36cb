"""A prefill node and two decode nodes through random interleavings of everything that may happen between and to them.

Prompts are handed over from the prefill node, and cached blocks are pulled from any node by any other.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, cast

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.common.fail_points import spoilt
from kvferry.common.nodes import Role
from kvferry.common.requests import FinishReason, GenerateRequest, SamplingParams
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.rpc.convert import output_from_pb
from kvferry.services.transfer import server
from tests.engine.fake_runner import generate
from tests.transfer import sim
from tests.transfer.sim import BLOCK, SLOT_BYTES, SimNode, contents
from tests.transfer.virtual import VirtualLoop
from tests.transfer.wire import Item, Wire, pick

POOL = 14
PREFIXES = [[p * 10 + i % 7 for i in range(32)] for p in range(2)]
FAULTS = {
    "cancel",
    "cancel in mid-copy",
    "clock jump",
    "connection broken",
    "decode crash",
    "lost",
    "overtaken",
    "prefill crash",
    "repeated",
    "spoilt",
}
"""What a run of many examples must have met, each of them."""
_ANY = st.integers(0, 1000)
_RARE = st.sampled_from((3, 2, 1, 0))
_Asked = tuple[int, int, int, bool]
_ASKED = st.tuples(st.integers(0, 1), st.integers(0, 32), st.integers(1, 12), st.booleans())
_HINTS = st.tuples(*[st.integers(0, 12)] * 4)
_Then = tuple[int, bool, str, bool]
_OFTEN = st.sampled_from((True, True, True, False))
_THEN = st.tuples(st.integers(0, 5), _OFTEN, st.sampled_from(("run", "begin", "wait")), _OFTEN)
_WELL = True, "run", True
_PATIENCE = 6  # rounds


@dataclass
class Sent:
    """A request, and what the client has of it."""

    spec: GenerateRequest
    node: SimNode
    got: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return len(self.ended) < self.spec.n


class TwoSides(RuleBasedStateMachine):
    num_steps: ClassVar[int] = 0
    num_adopted: ClassVar[int] = 0
    num_pulled: ClassVar[int] = 0
    num_revoked: ClassVar[int] = 0
    faults: ClassVar[dict[str, int]] = {}

    @initialize(share=st.booleans())
    def start(self, share: bool) -> None:
        self.transports: tuple[Any, ...] = ("shm", "grpc") if share else ("grpc",)
        self.was, sim.COPIES_WAIT = server._RUN_BYTES, True
        server._RUN_BYTES = 2 * BLOCK * SLOT_BYTES  # two blocks a message
        self.loop, self.wire = VirtualLoop(), Wire()
        self.want: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes] = {}
        self.sent: dict[str, Sent] = {}
        self.past: list[SimNode] = []
        self.prefill = SimNode(Role.PREFILL, self.loop, self.wire, POOL, self.transports)
        self.decodes = [self._new_decode(i) for i in range(2)]

    def _new_decode(self, which: int) -> SimNode:
        return SimNode(Role.DECODE, self.loop, self.wire, POOL + 6, self.transports, f"decode{which}")

    @property
    def nodes(self) -> list[SimNode]:
        return [self.prefill, *self.decodes]

    @property
    def decode(self) -> SimNode:
        return self.decodes[0]

    def _count(self, fault: str) -> None:
        assert fault in FAULTS
        self.faults[fault] = self.faults.get(fault, 0) + 1

    # ---- clients

    @rule(asked=_ASKED, n=st.sampled_from((1, 1, 2)), which=st.integers(0, 1), hints=_HINTS, then=_THEN)
    def submit(self, asked: _Asked, n: int, which: int, hints: tuple[int, ...], then: _Then) -> None:
        prefix, shared, own, is_next_turn = asked
        prompt = PREFIXES[prefix][:shared] + [random.Random(own).randrange(50) for _ in range(own)]
        if is_next_turn and self.sent:
            last = next(reversed(self.sent.values()))
            chat = [*last.spec.prompt_token_ids, *last.got.get(0, [])]
            prompt = chat[:40] + prompt[-own:]
        params = SamplingParams(max_tokens=1 + own % 5, seed=own)
        before = next((node for node in reversed(self.past) if node.role is Role.PREFILL), self.prefill)
        plan = tuple(dict.fromkeys((before.candidate, self.prefill.candidate)))  # hints may lie
        told = zip((*self.past[-1:], *self.nodes), hints, strict=False)
        holders = tuple(node.holder(hint) for node, hint in told if hint)
        spec = GenerateRequest(f"r{len(self.sent)}", tuple(prompt), params, n=n, prefill=plan, holders=holders)
        for index in range(n):
            chain = contents(prompt + generate(prompt, params.max_tokens, own + 100 * index))
            self.want |= chain
            self.parents |= {child: parent for parent, child in pairwise(chain)}
        node = self.decodes[which]
        self.sent[spec.request_id] = Sent(spec, node)
        node.call(node.service._submit, node.session, spec)
        self.go_on(then)

    @rule(which=_ANY, then=_THEN)
    def cancel_in_mid_copy(self, which: int, then: _Then) -> None:
        self.go_on(then)
        for _ in range(_PATIENCE):
            if copying := [sent for sent in self.sent.values() if sent.is_open and sent.node.jobs.num_begun]:
                return self._cancel(pick(copying, which))
            self.go_on((1, True, "begin", True))

    @rule(which=_ANY, then=_THEN)
    def cancel(self, which: int, then: _Then) -> None:
        self.go_on(then)
        self._cancel(pick((s for s in self.sent.values() if s.is_open), which))

    def _cancel(self, sent: Sent | None) -> None:
        if sent is not None:
            node = sent.node

            def cancel() -> None:
                request = node.service._requests[node.session.number, sent.spec.request_id, 0]
                node.service._cancel(request, sorted(request.open))

            self._read_outputs()
            if sent.is_open:
                self._count("cancel in mid-copy" if node.jobs.num_begun else "cancel")
                node.call(cancel)
                sent.ended |= dict.fromkeys(set(range(sent.spec.n)) - set(sent.ended), "cancelled")

    # ---- progress

    @rule(which=_ANY)
    def deliver(self, which: int) -> None:
        if found := pick(self.wire.lanes(), which):
            self.decode.call(self.wire.deliver, *found)

    @rule(then=_THEN)
    def go_on(self, then: _Then) -> None:
        """Some of what a healthy cluster does; what is left out waits. Every other rule may end with it, too."""
        rounds, deliver, copy, step = then  # a copy that has begun cannot be stopped, only waited for
        for _ in range(rounds):
            for found in self.wire.lanes() if deliver else ():
                self.decode.call(self.wire.deliver, *found)
            for node in self.nodes:
                if copy == "run":
                    node.copy()
                elif copy == "begin":
                    node.call(node.jobs.begin)
                if step:
                    node.step()

    @rule(seconds=st.sampled_from((0.5, 2.0, 3.5, 9.0)), sweep=st.booleans(), then=_THEN)
    def time_passes(self, seconds: float, sweep: bool, then: _Then) -> None:
        self.loop.advance(seconds)
        for node in self.nodes if sweep else ():
            node.sweep()
        self.go_on(then)

    # ---- mischief

    @rule(which=_ANY, how=st.sampled_from(("lost", "repeated", "overtaken")), then=_THEN)
    def message_goes_astray(self, which: int, how: str, then: _Then) -> None:
        """What no stream of gRPC does, and fail points do."""
        self.go_on(then)
        if flying := self._in_flight(which, num_messages=1 + (how == "overtaken")):
            self._count(how)
            messages = [i for i, item in enumerate(flying) if item[0] == "message"]
            first = messages[0]
            if how == "lost":
                del flying[first]
            elif how == "repeated":
                flying.insert(first, flying[first])
            else:
                other = messages[1]
                flying[first], flying[other] = flying[other], flying[first]

    @rule(which=_ANY, then=_THEN)
    def bytes_are_spoilt(self, which: int, then: _Then) -> None:
        self.go_on(then)
        if flying := self._in_flight(which, "Read", num_messages=1):
            first = next(i for i, item in enumerate(flying) if item[0] == "message")
            run = pb.BlockData.FromString(flying[first][1])
            if run.checksums:
                self._count("spoilt")
                spoilt_run = pb.BlockData(data=spoilt(run.data), checksums=run.checksums)
                flying[first] = ("message", spoilt_run.SerializeToString())

    def _in_flight(self, which: int, *paths: str, num_messages: int) -> deque[Item] | None:
        """A lane with so many messages, of blocks' bytes if that is asked for; some rounds are waited for one."""
        for _ in range(_PATIENCE):
            lanes = self.wire.lanes(*(paths or ("Run", "Read", "Handshake")))
            if found := pick(
                (
                    lane.in_flight
                    for call, lane in lanes
                    if sum(item[0] == "message" for item in lane.in_flight) >= num_messages
                    and (not paths or lane is call.down)
                ),
                which,
            ):
                return cast("deque[Item]", found)
            self.go_on((1, *_WELL))
        return None

    @rule(which=_ANY, then=_THEN)
    def connection_breaks(self, which: int, then: _Then) -> None:
        self.go_on(then)
        if call := pick((c for c in self.wire.calls if c.ended is None), which):
            self._count("connection broken")
            call.breaks()

    @rule(which=_ANY, then=_THEN)
    def owner_is_suspended_for_long(self, which: int, then: _Then) -> None:
        """Its leases are over when it wakes, and others use their blocks before any reader hears of it."""
        self.go_on(then)
        self._count("clock jump")
        node = pick(self.nodes, which)
        node.clock_skew_s += 9.0
        node.sweep()
        node.scribble()

    @rule(half_open=st.booleans(), dice=_RARE)
    def prefill_node_is_restarted(self, half_open: bool, dice: int) -> None:
        if dice:
            return
        self._count("prefill crash")
        self._bury(self.prefill)
        self.prefill.die(half_open=half_open)
        self.prefill = SimNode(Role.PREFILL, self.loop, self.wire, POOL, self.transports)

    @rule(which=st.integers(0, 1), half_open=st.booleans(), dice=_RARE)
    def decode_node_is_restarted(self, which: int, half_open: bool, dice: int) -> None:
        if dice:
            return
        self._count("decode crash")
        self._read_outputs()
        node = self.decodes[which]
        for sent in self.sent.values():
            if sent.node is node:
                sent.ended |= dict.fromkeys(set(range(sent.spec.n)) - set(sent.ended), "node died")
        self._bury(node)
        node.die(half_open=half_open)
        self.decodes[which] = self._new_decode(which)

    def _bury(self, node: SimNode) -> None:
        self.past.append(node)
        type(self).num_pulled += node.num_cached_pulls
        type(self).num_revoked += node.num_revoked

    # ---- what must hold

    @invariant()
    def promises_hold(self) -> None:
        type(self).num_steps += 1
        self._read_outputs()
        for node in self.nodes:
            node.check()
            node.check_contents(self.want, self.parents)
        dead = self.wire.dead
        wrong = [context for instance, context in self.loop.errors if instance not in dead]
        assert not wrong, wrong
        self.wire.forget_ended()

    def _read_outputs(self) -> None:
        outputs = []
        for node in self.decodes:
            outputs += node.session._pending
            node.session._pending = []
        for output in map(output_from_pb, outputs):
            sent = self.sent[output.request_id]
            assert output.finish_reason is not FinishReason.ERROR, f"{output.error_code}: {output.error_message}"
            assert output.index not in sent.ended, f"{output.request_id} went on after {sent.ended[output.index]}"
            tokens = sent.got.setdefault(output.index, [])
            tokens.extend(output.token_ids)
            params = sent.spec.sampling
            alone = generate(sent.spec.prompt_token_ids, params.max_tokens, params.seed + 100 * output.index)
            assert tokens == alone[: len(tokens)], f"{output.request_id}: other tokens than alone"
            type(self).num_adopted += bool(output.prefilled_by)
            if output.finish_reason is not None:
                assert tokens == alone
                sent.ended[output.index] = output.finish_reason.value

    def teardown(self) -> None:
        """Left alone, every request ends, and then nothing is owned by anybody."""
        if not hasattr(self, "loop"):
            return
        try:
            self._come_to_rest()
        finally:
            for node in self.nodes:
                self._bury(node)
                node.die(half_open=True)
            self.loop.close()
            server._RUN_BYTES, sim.COPIES_WAIT = self.was, False

    def _come_to_rest(self) -> None:
        for _ in range(200):
            if not any(sent.is_open for sent in self.sent.values()):
                break
            self.go_on((4, *_WELL))
            self.loop.advance(1.0)
            for node in self.nodes:
                node.sweep()
            self.promises_hold()
        unended = [sent.spec.request_id for sent in self.sent.values() if sent.is_open]
        assert not unended, f"no ending: {unended}"
        for _ in range(12):
            self.loop.advance(1.0)
            for node in self.nodes:
                node.sweep()
            self.go_on((2, *_WELL))
        for node in self.nodes:
            accounts = node.engine.load().accounts
            assert accounts.available == node.pool.num_blocks, f"{node.instance}: {accounts}"
            assert node.leases.num_open == node.service.num_active == 0
