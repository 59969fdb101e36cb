"""The running count of prompt tokens that wait equals a walk over all sequences."""

from __future__ import annotations

import random

import pytest

from kvferry.common.requests import SamplingParams
from kvferry.services.engine.scheduler import Scheduler
from kvferry.services.engine.sequence import Status
from tests.engine.engine_machine import BLOCK, make_engine, make_sequence


def walked(scheduler: Scheduler) -> int:
    """The specification: who waits will find what is cached now, and what those before it are to compute."""
    coming: set[bytes] = set()
    due = 0
    for seq in (*scheduler.running, *scheduler.received, *scheduler.waiting):
        num_found = 0
        if not seq.block_table:
            for name in seq.names[: seq.num_cacheable_blocks]:
                if name not in coming and not scheduler.pool.holds(name):
                    break
                num_found += seq.block_size
        left = seq.num_tokens - max(seq.num_computed_tokens, num_found)
        if left > (seq.status is Status.RUNNING):
            coming.update(seq.names)
            due += left
    return due


class Crowd:
    """Sequences with common beginnings, submitted at random. No prompt is another's beginning."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.engine, _, self.reports = make_engine(num_blocks=4000, max_num_seqs=5, max_num_waiting=500)
        self.num_submitted = 0

    def submit(self) -> None:
        rng, key = self.rng, f"s{self.num_submitted}"
        prompt = [rng.randrange(3)] * rng.randrange(4, 60) + [100 + self.num_submitted] * rng.randrange(1, 9)
        params = SamplingParams(max_tokens=rng.randrange(1, 9)) if rng.random() < 0.8 else None
        if params is None:
            del prompt[len(prompt) // BLOCK * BLOCK :]
        self.num_submitted += 1
        seq = make_sequence(key, prompt, params)
        if params is not None and rng.random() < 0.2:
            seq.add_branch(f"{key}.1", 1)
        self.engine.num_cached_tokens(seq)
        self.engine.submit(seq)

    def go_on(self) -> None:
        self.engine.step()
        reports, self.reports[:] = [*self.reports], []
        for report in reports:
            for blocks in report.blocks:
                if blocks.complete:
                    self.engine.close(blocks.key)


@pytest.mark.parametrize("seed", range(10))
def test_the_running_count_equals_a_walk_whatever_comes_and_starts(seed: int) -> None:
    """Nothing is evicted, cancelled or received, which a walk alone would see."""
    crowd = Crowd(seed)
    scheduler, most = crowd.engine.scheduler, 0
    for _ in range(300):
        if crowd.num_submitted < 80 and crowd.rng.random() < 0.6:
            crowd.submit()
        else:
            crowd.go_on()
        assert crowd.engine.num_waiting_tokens == walked(scheduler)
        most = max(most, len(scheduler.waiting))
    assert most > 10
    assert scheduler.waiting.num_found == 0
    assert crowd.engine.num_waiting_tokens == 0


def test_a_walk_puts_right_what_was_cancelled_meanwhile() -> None:
    crowd = Crowd(0)
    for key in ("a", "b"):
        seq = make_sequence(key, [1] * 21, SamplingParams(max_tokens=1))
        crowd.engine.num_cached_tokens(seq)
        crowd.engine.submit(seq)
    assert crowd.engine.num_waiting_tokens == 21 + 1
    crowd.engine.close("a")
    assert crowd.engine.num_waiting_tokens == 1, "the count does not look at who has gone"
    assert crowd.engine.load().num_waiting_tokens == 21
    assert crowd.engine.num_waiting_tokens == 21
