"""Every reachable state of small instances of the hand-over keeps the promises, and has a way to a clean end."""

from __future__ import annotations

import pytest

from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.protocol import ReaderSide
from tests.transfer.explore import INSTANCES, explore
from tests.transfer.small_world import Budgets, World

FLOORS = (12_500, 19_500, 3_100, 13_500, 11_000)


@pytest.mark.parametrize(("name", "floor"), list(zip(INSTANCES, FLOORS, strict=True)), ids=range(len(INSTANCES)))
def test_every_reachable_state_keeps_the_promises(name: str, floor: int, capsys: pytest.CaptureFixture[str]) -> None:
    found = explore(*INSTANCES[name])
    with capsys.disabled():
        print(f"\nexplored {name}: {found}")
    assert found.num_states >= floor, "the explorer has become blind to some of the states"
    assert found.num_over > 0


def test_the_explorer_sees_a_reader_that_adopts_without_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    def adopt(world: World, p: int) -> None:
        side = world.receives[p].side
        side.confirm()
        side.answered(True)
        world._adopt(p)

    monkeypatch.setattr(World, "confirm", adopt)
    with pytest.raises(AssertionError, match=r"holds .*other"):
        explore(1, Budgets(cancel=0, crash=0, reuse=1))


def test_the_explorer_sees_an_owner_that_never_expires_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseTable, "expire_due", lambda table: [])
    with pytest.raises(AssertionError, match=r"no way out after .*crash_reader"):
        explore(1, Budgets(cancel=0))


def test_the_explorer_sees_a_revoked_lease_that_is_called_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    release = LeaseTable.release
    monkeypatch.setattr(LeaseTable, "release", lambda table, lease_id: release(table, lease_id) or True)
    monkeypatch.setattr(World, "_end_runs", lambda world, lease_ids: None)
    with pytest.raises(AssertionError, match=r"holds .*other.*revoke"):
        explore(1, Budgets(cancel=0, crash=0, reuse=1, revoke=1), cached=True)


def test_the_explorer_sees_a_reader_that_adopts_what_the_owner_had_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReaderSide, "num_blocks", 2)
    with pytest.raises(AssertionError, match=r"holds .*evict"):
        explore(1, Budgets(cancel=0, crash=0, evict=1), cached=True)


def test_the_explorer_sees_blocks_that_are_freed_while_they_are_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "pin", lambda pool, block_ids: None)
    with pytest.raises(AssertionError):
        explore(1, Budgets(cancel=0, crash=0))


def test_the_explorer_sees_a_parent_that_is_evicted_before_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    unpin = BlockPool.unpin
    monkeypatch.setattr(BlockPool, "unpin", lambda pool, block_ids: unpin(pool, block_ids[::-1]))
    with pytest.raises(AssertionError, match=r"outlived its parent.*evict"):
        explore(1, Budgets(cancel=0, crash=0, evict=1))


def test_the_explorer_sees_blocks_that_are_taken_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that counted blocks and did not look which ones they are adopted what it had not copied."""

    def offered(side: ReaderSide, offer: object) -> tuple[int, ...]:
        count = min(len(offer.block_ids), len(side._block_ids) - side._num_offered)  # type: ignore[attr-defined]
        side._num_offered += count
        return side._block_ids[side._num_offered - count : side._num_offered]

    monkeypatch.setattr(ReaderSide, "offered", offered)
    with pytest.raises(AssertionError):
        explore(1, Budgets(cancel=0, crash=0, drop=1, duplicate=1))
