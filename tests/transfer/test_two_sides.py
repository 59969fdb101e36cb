"""Runs the machine of both sides, and says how far it came."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.transfer.two_sides import FAULTS, TwoSides

SETTINGS = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def test_no_interleaving_of_faults_breaks_a_promise_on_either_side(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):  # what one run has missed by chance, three hardly do
        run_state_machine_as_test(TwoSides, settings=SETTINGS)  # type: ignore[no-untyped-call]
        if TwoSides.faults.keys() >= FAULTS and TwoSides.num_revoked and TwoSides.num_adopted and TwoSides.num_pulled:
            break
    with capsys.disabled():
        faults = ", ".join(f"{count} x {name}" for name, count in sorted(TwoSides.faults.items()))
        print(
            f"\ntwo sides: {TwoSides.num_steps} steps, {TwoSides.num_adopted} prompts received, "
            f"{TwoSides.num_pulled} pulls of cached blocks, {TwoSides.num_revoked} leases revoked; {faults}"
        )
    missing = FAULTS - TwoSides.faults.keys()
    assert not missing, f"never happened: {', '.join(sorted(missing))}"
    assert TwoSides.num_revoked > 0, "no lease was ever revoked"
    assert TwoSides.num_adopted > 0, "no hand-over ever came to its end"
    assert TwoSides.num_pulled > 0, "no pull of cached blocks ever came to its end"
