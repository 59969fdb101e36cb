"""The real engine, scheduler and block pool through random interleavings of everything that may happen to them.

After every step the account balances; at the end every sequence has produced exactly what a lone one would have.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.common.errors import Overloaded, PromptExceedsPool
from kvferry.common.hashing import root_name
from kvferry.common.requests import BeamParams, SamplingParams
from kvferry.services.engine.beam import BeamSearch
from kvferry.services.engine.beam_groups import make_group
from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.limits import SchedulerLimits
from kvferry.services.engine.outputs import AdmittedOutput, StepReport
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Sequence
from kvferry.services.engine.waiting import MAX_OVERTAKEN, order
from tests.engine.fake_runner import FakeRunner, beam_search, generate

BLOCK = 4
POOL = 24
END_TOKENS = frozenset((7,))
BEAMS = (BeamParams(), BeamParams(2.0, "true"), BeamParams(0.0, "never"))
ROOT = root_name("model", "numerics")
_BRANCHES = st.sampled_from((1, 1, 1, 2, 4))
PREFIXES = [[p * 10 + i % 7 for i in range(30)] for p in range(3)]


@dataclass
class Expected:
    prompt: list[int]
    params: SamplingParams | None
    got: list[int] = field(default_factory=list)
    ended: bool = False
    offered: tuple[int, ...] = ()
    index: int = 0
    entered: list[int] = field(default_factory=list)  # what a receive is to bring
    beam: tuple[int, ...] = ()


def make_engine(num_blocks: int = POOL, **limits: Any) -> tuple[Engine, FakeRunner, list[StepReport]]:
    defaults: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "max_num_waiting": 50}
    runner = FakeRunner(num_blocks, BLOCK)
    reports: list[StepReport] = []
    scheduler = Scheduler(BlockPool(num_blocks), SchedulerLimits(**(defaults | limits)))
    return Engine(runner, scheduler, (), num_blocks * BLOCK, reports.append), runner, reports


def make_sequence(key: str, prompt: list[int], params: SamplingParams | None, receive: bool = False) -> Sequence:
    return Sequence(key, list(prompt), len(prompt), ROOT, BLOCK, params, receive=receive)


class EngineMachine(RuleBasedStateMachine):
    limits: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.runner, self.reports = make_engine(**self.limits)
        self.expected: dict[str, Expected] = {}
        self.receives: dict[str, AdmittedOutput] = {}
        self.leases: list[tuple[int, ...]] = []
        self.names: set[bytes] = set()
        self.made: list[Sequence] = []
        self.serial = 0

    def _prompt(self, prefix: int, shared: int, own: int) -> list[int]:
        return PREFIXES[prefix][:shared] + [random.Random(own).randrange(50) for _ in range(own)] or [1]

    def _submit(
        self,
        prompt: list[int],
        params: SamplingParams | None,
        receive: bool = False,
        n: int = 1,
        num_had: tuple[int, ...] = (0, 0, 0, 0),
    ) -> None:
        """`num_had`: for each choice, tokens that another engine has produced."""
        self.serial += 1
        keys = [f"s{self.serial}.{index}" for index in range(n)]
        had = [generate(prompt, num, (params.seed if params else 0) + 100 * i) for i, num in enumerate(num_had)]
        self.expected |= {key: Expected(prompt, params, list(had[i]), index=i) for i, key in enumerate(keys)}
        seq = make_sequence(keys[0], prompt, params, receive)
        if n == 1:
            seq.token_ids += had[0]
        else:
            seq.resumed_token_ids = tuple(had[0])
        self.expected[keys[0]].entered = list(seq.token_ids)
        if self.engine.scheduler.limits.policy == "priority":
            seq.priority = self.serial * 7 % 5 - 2
        for index, key in enumerate(keys[1:], 1):
            seq.add_branch(key, index, tuple(had[index]))
        self.made += (seq, *seq.branches)
        try:
            self.engine.submit(seq)
        except (PromptExceedsPool, Overloaded):
            for key in keys:
                del self.expected[key]
        self._digest()

    @rule(prefix=st.integers(0, 2), shared=st.integers(1, 20), width=st.integers(1, 4), new=st.integers(1, 8))
    def submit_beam_search(self, prefix: int, shared: int, width: int, new: int) -> None:
        self._submit_beams(PREFIXES[prefix][:shared], width, new, BEAMS[new % 3])
        self._digest()

    def _submit_beams(self, prompt: list[int], width: int, new: int, beam: BeamParams) -> None:
        self.serial += 1
        keys = tuple(f"s{self.serial}.{index}" for index in range(width))
        params = SamplingParams(max_tokens=new, beam=beam)
        seq = make_sequence(keys[0], prompt, params)
        make_group(seq, params, keys, new, END_TOKENS)
        search = BeamSearch(width, beam, new, END_TOKENS)
        found = beam_search(prompt, search, BeamSearch.num_candidates(width, len(END_TOKENS)))
        for index, (key, tokens) in enumerate(zip(keys, found, strict=True)):
            self.expected[key] = Expected(prompt, params, index=index, beam=tokens)
        try:
            self.engine.submit(seq)
        except (PromptExceedsPool, Overloaded):
            for key in keys:
                del self.expected[key]

    def _digest(self) -> None:
        reports, self.reports[:] = list(self.reports), []
        for report in reports:
            for admitted in report.admitted:
                self.receives[admitted.key] = admitted
            for token in report.tokens:
                want = self.expected[token.key]
                assert not want.ended, f"{token.key} went on after its end"
                want.got.append(token.token_id)
                want.ended = token.finish_reason is not None
                assert want.params is not None
                if want.beam:
                    assert tuple(want.got) == want.beam[: len(want.got)], token.key
                    assert want.ended == (len(want.got) == len(want.beam))
                    continue
                alone = generate(want.prompt, len(want.got), want.params.seed + 100 * want.index)
                assert want.got == alone, token.key
                assert want.ended == (len(want.got) == want.params.max_tokens)
            for blocks in report.blocks:
                want = self.expected[blocks.key]
                assert blocks.block_ids[: len(want.offered)] == want.offered, "an offered block has moved"
                self.engine.pin(blocks.block_ids[len(want.offered) :])
                want.offered = blocks.block_ids
                if blocks.complete:
                    want.ended = True
                    assert len(blocks.block_ids) * BLOCK == len(want.prompt)
                    self.leases.append(blocks.block_ids)
                    self.engine.close(blocks.key)
            assert not report.failed
            assert not set(report.changes.removed) - self.names
            self.names = (self.names | set(report.changes.stored)) - set(report.changes.removed)

    @rule(
        prefix=st.integers(0, 2), shared=st.integers(0, 30), own=st.integers(0, 12), new=st.integers(1, 14), n=_BRANCHES
    )
    def submit(self, prefix: int, shared: int, own: int, new: int, n: int) -> None:
        seed = new % 3
        self._submit(self._prompt(prefix, shared, own), SamplingParams(max_tokens=new, seed=seed), n=n)

    @rule(prefix=st.integers(0, 2), shared=st.integers(5, 30), own=st.integers(0, 8), n=_BRANCHES)
    def submit_receiving(self, prefix: int, shared: int, own: int, n: int) -> None:
        self._submit(self._prompt(prefix, shared, own), SamplingParams(max_tokens=4), receive=True, n=n)

    @rule(
        prefix=st.integers(0, 2),
        shared=st.integers(1, 30),
        n=_BRANCHES,
        num_had=st.tuples(*[st.integers(0, 13)] * 4),
        receive=st.booleans(),
    )
    def submit_resumed(self, prefix: int, shared: int, n: int, num_had: tuple[int, ...], receive: bool) -> None:
        prompt = self._prompt(prefix, shared, 3)
        self._submit(prompt, SamplingParams(max_tokens=14), receive, n, num_had)

    @rule(prefix=st.integers(0, 2), blocks=st.integers(1, 7))
    def submit_compute_only(self, prefix: int, blocks: int) -> None:
        self._submit(PREFIXES[prefix][: blocks * BLOCK], None)

    @rule()
    def step(self) -> None:
        self.engine.step()
        self._digest()

    @precondition(lambda self: self.receives)
    @rule(data=st.data(), lost=st.booleans(), cancel=st.booleans())
    def receive_ends(self, data: st.DataObject, lost: bool, cancel: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.receives)))
        admitted = self.receives.pop(key)
        if cancel:
            for one in [k for k in self.expected if k.split(".")[0] == key.split(".")[0]]:
                self.expected[one].ended = True
                self.engine.close(one)
            self.engine.close(key)
        elif lost:
            self.runner.spoil(admitted.block_ids)
            self.engine.receive_ended(key, 0)
        else:
            self.runner.fill(admitted.block_ids, self.expected[key].entered, admitted.first_block)
            self.engine.receive_ended(key, admitted.first_block + len(admitted.block_ids))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if live := self._cancellable():
            self._cancel(data.draw(st.sampled_from(live)))

    @rule(data=st.data())
    def cancel_while_a_step_computes(self, data: st.DataObject) -> None:
        def during() -> None:
            live = [k for k in self._cancellable() if k not in self.receives]
            if live:
                self._cancel(data.draw(st.sampled_from(live)))

        self.runner.during = during
        self.engine.step()
        self.runner.during = None
        self._digest()

    def _cancellable(self) -> list[str]:
        """Sequences that may be closed now: not the last choice of a prompt that is being received."""
        live = [k for k, e in self.expected.items() if not e.ended]
        receiving = {key.split(".")[0] for key in self.receives}
        mates = [k.split(".")[0] for k in live]
        return [k for k, mate in zip(live, mates, strict=True) if mate not in receiving or mates.count(mate) > 1]

    def _cancel(self, key: str) -> None:
        self.expected[key].ended = True
        self.engine.unpin(self.expected[key].offered)
        self.engine.close(key)
        self.engine.close(key)

    @precondition(lambda self: self.leases)
    @rule()
    def lease_ends(self) -> None:
        blocks = self.leases.pop(0)
        for block in blocks:
            assert b"spoiled" not in self.runner.slots[block]
        self.engine.unpin(blocks)

    @invariant()
    def account_balances(self) -> None:
        self.engine.check()
        load = self.engine.load()
        assert load.accounts.total == POOL
        assert self.engine.num_waiting_tokens == load.num_waiting_tokens
        pending = self.engine.pool._changed
        stored = {name for name, held in pending.items() if held}
        told = (self.names | stored) - (set(pending) - stored)
        assert set(self.engine.held_names()) == told, "the index would be told something else than what is held"
        for parent, child in (pair for seq in self.made for pair in pairwise(seq.names)):
            assert self.engine.pool.holds(parent) or not self.engine.pool.holds(child), "evicted before its child"

    def teardown(self) -> None:
        """Whatever is left runs to its end, and then nothing is owned by anybody."""
        for blocks in self.leases:
            self.engine.unpin(blocks)
        self.leases = []
        for _ in range(400):
            for key in list(self.receives):
                self.receives.pop(key)
                self.engine.receive_ended(key, 0)
            if not self.engine.step() and not self.receives and not self.leases:
                self._digest()
                if not self.receives and not self.leases:
                    break
            self._digest()
            for blocks in self.leases:
                self.engine.unpin(blocks)
            self.leases = []
        assert all(e.ended for e in self.expected.values()), "a sequence never ended"
        self.engine.check()
        accounts = self.engine.load().accounts
        assert accounts.available == POOL, accounts


class LimitedMachine(EngineMachine):
    """The same under priorities and with every limit so low that it is reached."""

    limits: ClassVar[dict[str, Any]] = {
        "policy": "priority",
        "long_prefill_token_threshold": 5,
        "max_num_waiting": 12,
        "max_num_waiting_tokens": 150,
        "max_num_preemptions": 2,
    }

    @invariant()
    def limits_hold(self) -> None:
        scheduler, most = self.engine.scheduler, self.limits
        fresh = [seq for seq in scheduler.waiting if not seq.num_preemptions]
        assert len(fresh) <= most["max_num_waiting"]
        assert len(fresh) <= 1 or sum(seq.num_tokens for seq in fresh) <= most["max_num_waiting_tokens"]
        assert [*scheduler.waiting] == sorted(scheduler.waiting, key=order)
        assert scheduler.running == sorted(scheduler.running, key=order)
        for seq in (*scheduler.waiting, *scheduler.running):
            assert seq.num_overtaken <= MAX_OVERTAKEN
            assert seq.group is not None or seq.num_preemptions <= most["max_num_preemptions"], (
                "a victim once too often"
            )
