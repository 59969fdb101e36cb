"""The two sides of a hand-over by example: what is offered, what is believed, how each ends."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from kvferry.common.errors import BlocksGone, LeaseExpired, Overloaded, TransferFailed
from kvferry.services.transfer import base
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.protocol import (
    OWNER_MOVES,
    READER_MOVES,
    Offer,
    OwnerSide,
    OwnerState,
    ReaderSide,
    ReaderState,
)


class Rig:
    def __init__(self, first_block: int = 0) -> None:
        self.now, self.pins = 0.0, list[int]()
        self.table = LeaseTable(self.pins.extend, self._unpin, lease_s=8.0, clock=lambda: self.now)
        self.side = OwnerSide(self.table, "reader", first_block)

    def _unpin(self, block_ids: object) -> None:
        self.pins.clear()


def reader(*block_ids: int, first_block: int = 0) -> ReaderSide:
    side = ReaderSide(first_block, block_ids)
    side.accepted("lease", first_block + len(block_ids))
    return side


def test_an_owner_pins_from_block_zero_and_reports_from_where_the_reader_lacks_them() -> None:
    rig = Rig(first_block=2)
    assert rig.side.filled([5, 6], complete=False) is None
    assert rig.side.filled([5, 6, 7, 8], complete=True) == Offer(2, (7, 8))
    assert rig.pins == [5, 6, 7, 8]
    assert rig.side.state is OwnerState.COMPUTED
    assert rig.side.release()
    assert rig.pins == []
    assert rig.side.state is OwnerState.RELEASED


def test_an_owner_that_ends_gives_its_pins_back_at_any_stage_and_once() -> None:
    rig = Rig()
    rig.side.filled([5], complete=False)
    rig.side.end()
    rig.side.end()
    assert rig.side.state is OwnerState.ABORTED
    assert rig.table.counts().num_released == 1
    assert rig.pins == []


def test_an_owner_offers_nothing_under_an_expired_lease() -> None:
    rig = Rig()
    rig.now = 8.0
    with pytest.raises(LeaseExpired):
        rig.side.filled([5], complete=True)
    assert rig.pins == []
    assert rig.side.state is OwnerState.COMPUTING


def test_a_reader_confirms_when_all_is_offered_copied_and_computed() -> None:
    side = reader(7, 8, 9, first_block=4)
    assert side.offered(Offer(4, (1, 2))) == (7, 8)
    side.copied(2)
    assert side.offered(Offer(6, (3,))) == (9,)
    side.computed()
    with pytest.raises(TransferFailed, match="2 of 3 blocks"):
        side.confirm()
    side.copied(1)
    side.confirm()
    side.answered(True)
    side.end()
    assert side.state is ReaderState.CONFIRMED


@pytest.mark.parametrize(
    ("offers", "what"),
    [
        ([Offer(0, (1,)), Offer(0, (1,))], "repeated"),
        ([Offer(1, (2,))], "one left out"),
        ([Offer(0, (1, 2, 3))], "more than asked for"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_reader_takes_each_block_once_and_in_its_turn(offers: list[Offer], what: str) -> None:
    side = reader(7, 8)
    for offer in offers[:-1]:
        side.offered(offer)
    with pytest.raises(TransferFailed, match="were offered, expected some of"):
        side.offered(offers[-1])


def test_a_reader_wants_no_more_than_the_owner_has() -> None:
    side = ReaderSide(4, (7, 8, 9))
    side.accepted("lease", 6)
    assert side.num_blocks == 2
    assert side.offered(Offer(4, (1, 2))) == (7, 8)
    with pytest.raises(TransferFailed, match="were offered"):
        side.offered(Offer(6, (3,)))
    side.copied(2)
    side.computed()
    side.confirm()
    side.answered(True)


@pytest.mark.parametrize("num_blocks", [0, 3, 4])
def test_a_reader_leaves_an_owner_that_has_nothing_new(num_blocks: int) -> None:
    side = ReaderSide(4, (7, 8, 9))
    with pytest.raises(BlocksGone, match=f"{num_blocks} leading blocks are there, the reader has 4"):
        side.accepted("lease", num_blocks)


def test_an_owner_offers_no_cached_blocks_above_the_cap_and_pins_none() -> None:
    rig = Rig()
    rig.side.end()
    side = OwnerSide(rig.table, "reader", 0, for_cached=True)
    with pytest.raises(Overloaded, match="1 cached blocks pinned for peers, allowed 0"):
        side.filled([5], complete=True)
    assert rig.pins == []


def test_a_reader_takes_no_offer_before_it_was_accepted_or_after_the_last() -> None:
    with pytest.raises(TransferFailed, match="in state asked"):
        ReaderSide(0, (7,)).offered(Offer(0, (1,)))
    side = reader(7)
    side.computed()
    with pytest.raises(TransferFailed):
        side.offered(Offer(0, (1,)))


def test_a_lease_that_was_not_valid_throughout_drops_the_blocks() -> None:
    side = reader(7)
    side.offered(Offer(0, (1,)))
    side.copied(1)
    side.computed()
    side.confirm()
    with pytest.raises(LeaseExpired):
        side.answered(False)
    assert side.state is ReaderState.DROPPED


def test_every_state_and_every_end_is_in_the_drawing() -> None:
    drawing = base.__doc__ or ""
    page = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
    for state in (*OWNER_MOVES, *READER_MOVES):
        assert re.search(rf"\b{state.name}\b", drawing), f"{state} is not drawn in base.py"
        assert re.search(rf"\b{state.name}\b", page), f"{state} is not drawn in docs/architecture.md"


def test_a_lease_id_cannot_be_guessed_from_what_a_peer_may_know() -> None:
    """Neither from the ids it was given before, nor from the state of this process's dice: 128 bits of the system's."""
    ids = []
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        table = LeaseTable(lambda _: None, lambda _: None, lease_s=8.0, clock=lambda: 0.0)
        ids += [table.open("reader").lease_id for _ in range(500)]
    assert len(set(ids)) == 1000
    bits = np.array([[int(bit) for bit in f"{int(lease_id, 16):0128b}"] for lease_id in ids])
    assert (abs(bits.mean(axis=0) - 0.5) < 0.1).all(), "some bits of an id can be told in advance"
