"""Blocks that have been reported to a service may be pinned a moment later: they must still be what they were."""

from __future__ import annotations

import pytest

from kvferry.services.engine.block_pool import BlockPool
from tests.engine.engine_machine import BLOCK, POOL, make_engine, make_sequence


def test_a_compute_only_prompt_whose_step_fails_keeps_its_blocks_until_it_is_closed() -> None:
    engine, runner, reports = make_engine(max_num_batched_tokens=2 * BLOCK)
    engine.submit(make_sequence("a", list(range(4 * BLOCK)), None))
    engine.step()
    (offered,) = [blocks.block_ids for report in reports for blocks in report.blocks]
    filled = [list(runner.slots[block_id]) for block_id in offered]
    runner.fail_next = True
    engine.step()
    assert [failed.key for report in reports for failed in report.failed] == ["a"]
    engine.submit(make_sequence("b", [9] * POOL * BLOCK, None))  # takes whatever is to be had
    assert not engine.step()
    assert [list(runner.slots[block_id]) for block_id in offered] == filled
    engine.pin(offered)  # by a service that has not heard of the failure yet
    engine.close("a")
    assert engine.load().accounts.lease == len(offered)
    engine.close("b")
    engine.unpin(offered)
    engine.check()
    assert engine.load().accounts.available == POOL


def test_a_pin_that_is_refused_pins_nothing() -> None:
    pool = BlockPool(4)
    (held,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="cannot be leased"):
        pool.pin([held, 3])
    pool.release([held])
    pool.check()
    assert pool.num_available == 4
