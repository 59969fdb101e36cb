"""Prompts of a simulated node get the tokens of its steps in the order in which the engine gives them."""

from __future__ import annotations

import random
from collections.abc import Sequence as List
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.nodes import LayoutCard, Role
from kvferry.services.engine.schedule import Schedule
from kvferry.services.local.simulate.node import Pool, Prompt, SimNode
from kvferry.services.local.simulate.profile import load_profile
from tests.engine.engine_machine import BLOCK, make_engine, make_sequence

BUDGET = 64
PROFILE = replace(load_profile(), max_num_batched_tokens=BUDGET)
CARD = LayoutCard("simulated", "", "float16", BLOCK, 1, 1, 1, "")

Arrival = tuple[int, int, int]  # steps after the one before, blocks, of which so many have been received
Steps = list[list[tuple[int, int]]]  # of each step, the prompt and how many tokens of it, in the order of arrival


def real(arrivals: List[Arrival]) -> Steps:
    """On a prefill node's engine. Who receives had its blocks reserved before the first step."""
    engine, runner, reports = make_engine(num_blocks=1000, max_num_batched_tokens=BUDGET)
    steps: Steps = []
    execute = runner.execute

    def watched(schedule: Schedule) -> object:
        steps.append(sorted((int(row.sequence.key), row.num_tokens) for row in schedule.rows))
        return execute(schedule)

    runner.execute = watched  # type: ignore[method-assign, assignment]
    sequences = [make_sequence(str(n), [n + 1] * blocks * BLOCK, None) for n, (_, blocks, _) in enumerate(arrivals)]
    blocks_of = {}
    for turn, (seq, (_, _, received)) in enumerate(zip(sequences, arrivals, strict=True)):
        seq.arrival_s, seq.receive = float(turn), received > 0
        if seq.receive:
            engine.submit(seq)
            (admitted,) = reports[-1].admitted
            blocks_of[seq.key] = admitted.block_ids
    for seq, (wait, _, received) in zip(sequences, arrivals, strict=True):
        for _ in range(wait):
            engine.step()
        if received:
            runner.fill(blocks_of[seq.key][:received], seq.token_ids, 0)
            engine.receive_ended(seq.key, received)
        else:
            engine.submit(seq)
    while engine.step():
        pass
    return [step for step in steps if step]


def simulated(arrivals: List[Arrival]) -> Steps:
    node = SimNode("p0", Role.PREFILL, CARD, PROFILE, Pool(1000), random.Random(0))
    steps: Steps = []

    def step() -> bool:
        """Of what it computes, each chunk is told when it ends."""
        steps.append([])
        if (took_s := node.begin_step()) is None:
            return False
        node.step_ends(took_s)
        return True

    def prompt(turn: int, start: int, end: int) -> Prompt:
        return Prompt(turn, start, end, lambda count: steps[-1].append((turn, count)), lambda: 0)

    for turn, (wait, blocks, received) in enumerate(arrivals):
        for _ in range(wait):
            step()
        node.prompts.add(prompt(turn, received * BLOCK, blocks * BLOCK), received=received > 0)
    while step():
        pass
    return [sorted(chunks) for chunks in steps if chunks]


@st.composite
def arrival(draw: st.DrawFn) -> Arrival:
    blocks = draw(st.integers(1, 40) | st.integers(40, 60))
    return draw(st.integers(0, 3)), blocks, draw(st.just(0) | st.integers(0, blocks - 1))


@given(st.lists(arrival(), min_size=2, max_size=6))
def test_simulated_prompts_share_steps_as_the_scheduler_makes_them(arrivals: list[Arrival]) -> None:
    assert simulated(arrivals) == real(arrivals)
