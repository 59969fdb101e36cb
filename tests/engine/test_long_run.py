"""The engine machines through one long seeded run: tens of thousands of steps in which everything happens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.engine_machine import POOL, EngineMachine, LimitedMachine

NUM_STEPS = 12_000  # of each machine


class _Choices:
    """Stands in for hypothesis where a rule draws one of several things."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def draw(self, strategy: Any) -> Any:
        return self._rng.choice(list(strategy.elements))


def _act(machine: EngineMachine, rng: random.Random, data: Any) -> None:
    """One thing that may happen, at random; steps most often."""
    at = {"prefix": rng.randrange(3), "shared": rng.randint(5, 30), "own": rng.randint(0, 8)}
    kind = rng.random()
    if kind < 0.70:
        machine.step()
    elif kind < 0.82 and len(machine.expected) < 60:
        machine.submit(**at, new=rng.randint(1, 14), n=rng.choice((1, 1, 2, 4)))
    elif kind < 0.85:
        machine.submit_receiving(**at, n=rng.choice((1, 2)))
    elif kind < 0.87:
        machine.submit_compute_only(prefix=at["prefix"], blocks=rng.randint(1, 7))
    elif kind < 0.89:
        machine.submit_beam_search(prefix=at["prefix"], shared=rng.randint(1, 20), width=rng.randint(1, 4), new=4)
    elif kind < 0.94 and machine.receives:
        machine.receive_ends(data=data, lost=rng.random() < 0.2, cancel=rng.random() < 0.2)
    elif kind < 0.96:
        machine.cancel(data=data)
    elif kind < 0.97:
        machine.cancel_while_a_step_computes(data=data)
    elif machine.leases:
        machine.lease_ends()


@pytest.mark.parametrize("kind", [EngineMachine, LimitedMachine])
def test_the_account_balances_and_every_token_is_right_through_a_long_run(kind: type[EngineMachine]) -> None:
    machine, rng, preemptions, submitted = kind(), random.Random(1), 0, 0
    data = _Choices(rng)
    digest = machine._digest

    def counting() -> None:
        nonlocal preemptions
        preemptions += sum(report.stats.num_preemptions for report in machine.reports)
        digest()

    machine._digest = counting  # type: ignore[method-assign]
    while machine.engine.num_steps < NUM_STEPS:
        _act(machine, rng, data)
        machine.account_balances()
        if isinstance(machine, LimitedMachine):
            machine.limits_hold()
        if len(machine.expected) > 50:
            going_on = {key.split(".")[0] for key, one in machine.expected.items() if not one.ended}
            going_on |= {key.split(".")[0] for key in machine.receives}
            machine.expected = {key: one for key, one in machine.expected.items() if key.split(".")[0] in going_on}
    submitted = machine.serial
    machine.teardown()
    print(f"{kind.__name__}: {machine.engine.num_steps} steps, {submitted} requests, {preemptions} preemptions")
    assert machine.engine.num_steps >= NUM_STEPS
    assert preemptions > 100, "hardly anything was preempted: this run tests little"
    assert machine.engine.load().accounts.available == POOL
