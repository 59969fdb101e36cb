"""The two sides of one hand-over as plain states, drawn in `base.py`. No wire, no clock, no tasks, no tensors.

`services/node/owner.py` runs an `OwnerSide` for each stream, `services/node/reader.py` a `ReaderSide`; they send and
copy what these say, and nothing else decides whether a block is offered or adopted. `tests/transfer/explore.py` visits
every state that the two can reach together.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvferry.common.errors import BlocksGone, LeaseExpired, TransferFailed
from kvferry.services.transfer.lease import LeaseTable


class OwnerState(enum.Enum):
    COMPUTING = "computing"  # blocks are filled, and offered as they are
    COMPUTED = "computed"  # all are offered; the reader copies the rest
    RELEASED = "released"  # the reader has copied all it wants, and was told whether the lease was valid throughout
    ABORTED = "aborted"  # the reader left, the lease expired, or computing failed


class ReaderState(enum.Enum):
    ASKED = "asked"  # blocks are reserved, the owner has not answered
    PULLING = "pulling"  # blocks are copied, in order, as they are offered
    CONFIRMING = "confirming"  # all are copied, the owner was asked whether the lease was valid throughout
    CONFIRMED = "confirmed"  # it was: the blocks may be adopted
    DROPPED = "dropped"  # nothing writes into the blocks any more, and none of their bytes may be used


OWNER_MOVES: Mapping[OwnerState, frozenset[OwnerState]] = {
    OwnerState.COMPUTING: frozenset((OwnerState.COMPUTED, OwnerState.RELEASED, OwnerState.ABORTED)),
    OwnerState.COMPUTED: frozenset((OwnerState.RELEASED, OwnerState.ABORTED)),
    OwnerState.RELEASED: frozenset(),
    OwnerState.ABORTED: frozenset(),
}
READER_MOVES: Mapping[ReaderState, frozenset[ReaderState]] = {
    ReaderState.ASKED: frozenset((ReaderState.PULLING, ReaderState.DROPPED)),
    ReaderState.PULLING: frozenset((ReaderState.CONFIRMING, ReaderState.DROPPED)),
    ReaderState.CONFIRMING: frozenset((ReaderState.CONFIRMED, ReaderState.DROPPED)),
    ReaderState.CONFIRMED: frozenset(),
    ReaderState.DROPPED: frozenset(),
}

_State = TypeVar("_State", OwnerState, ReaderState)


def _moved(moves: Mapping[_State, frozenset[_State]], now: _State, to: _State) -> _State:
    assert to in moves[now], f"no way from {now} to {to}"
    return to


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks `[first, first + len(block_ids))` of the prompt, complete and pinned."""

    first: int
    block_ids: tuple[int, ...]


class OwnerSide:
    """One prompt offered to one reader under one lease, which opens here and ends with `release` or `end`."""

    def __init__(self, leases: LeaseTable, reader: str, first_block: int, *, for_cached: bool = False) -> None:
        self.state = OwnerState.COMPUTING
        self.lease_id = leases.open(reader, for_cached=for_cached).lease_id
        self._leases = leases
        self._num_pinned = 0
        self._num_reported = first_block

    def filled(self, block_ids: Sequence[int], *, complete: bool) -> Offer | None:
        """The prompt's first `len(block_ids)` blocks are filled; what the reader must hear of them, if anything.

        Pins from block 0, so that no parent is evicted before its child. Raises LeaseExpired, or Overloaded where peers
        have pinned as many cached blocks as they may; then nothing is offered.
        """
        self._leases.extend(self.lease_id, block_ids[self._num_pinned :])
        self._num_pinned = len(block_ids)
        if complete:
            self._move(OwnerState.COMPUTED)
        new = tuple(block_ids[self._num_reported :])
        if not new:
            return None
        self._num_reported += len(new)
        return Offer(self._num_reported - len(new), new)

    def renew(self) -> None:
        """Raises LeaseExpired when that comes too late."""
        self._leases.renew(self.lease_id)

    def release(self) -> bool:
        """The reader has copied: was the lease valid throughout? Ends it."""
        self._move(OwnerState.RELEASED)
        return self._leases.release(self.lease_id)

    def end(self) -> None:
        """The reader is gone, or the run has failed. Gives the pins back at whatever stage. Idempotent."""
        if OWNER_MOVES[self.state]:
            self._move(OwnerState.ABORTED)
            self._leases.release(self.lease_id)

    def _move(self, to: OwnerState) -> None:
        self.state = _moved(OWNER_MOVES, self.state, to)


class ReaderSide:
    """One prompt's missing blocks, `[first_block, first_block + len(block_ids))`, on their way into own blocks.

    Believes nothing that it can check: each block is offered once and in its turn, and all are copied before the owner
    is asked. A peer that says otherwise is answered with TransferFailed.
    """

    def __init__(self, first_block: int, block_ids: Sequence[int]) -> None:
        self.state = ReaderState.ASKED
        self.lease_id = ""
        self._first_block = first_block
        self._block_ids = tuple(block_ids)
        self._num_offered = self._num_copied = 0
        self._is_computed = False

    @property
    def num_blocks(self) -> int:
        """How many it is about: those that were wanted, from the first one on, and that the owner has or will have."""
        return len(self._block_ids)

    def accepted(self, lease_id: str, num_blocks: int) -> None:
        """The owner will offer the prompt's blocks up to `num_blocks`. Raises BlocksGone when that is none of these."""
        self._block_ids = self._block_ids[: max(num_blocks - self._first_block, 0)]
        if not self._block_ids:
            raise BlocksGone(f"{num_blocks} leading blocks are there, the reader has {self._first_block}")
        self.lease_id = lease_id
        self._move(ReaderState.PULLING)

    def offered(self, offer: Offer) -> tuple[int, ...]:
        """Own blocks that the offered ones are to be copied into, in order."""
        start, stop = self._num_offered, self._num_offered + len(offer.block_ids)
        if self.state is not ReaderState.PULLING or self._is_computed:
            raise TransferFailed(f"blocks from {offer.first} were offered in state {self.state.value}")
        if offer.first != self._first_block + start or stop > len(self._block_ids):
            raise TransferFailed(
                f"blocks [{offer.first}, {offer.first + len(offer.block_ids)}) were offered, expected some of "
                f"[{self._first_block + start}, {self._first_block + len(self._block_ids)})"
            )
        self._num_offered = stop
        return self._block_ids[start:stop]

    def copied(self, num_blocks: int) -> None:
        """The next `num_blocks` offered blocks are here, their checksums right where the transport has some."""
        self._num_copied += num_blocks
        assert self.state is ReaderState.PULLING, self.state
        assert self._num_copied <= self._num_offered, "copied what was not offered"

    def computed(self) -> None:
        """The owner will offer nothing more."""
        self._is_computed = True

    def confirm(self) -> None:
        """Before the owner is asked. Raises TransferFailed unless every block was offered and copied."""
        if not self._is_computed or self._num_copied < len(self._block_ids):
            raise TransferFailed(f"{self._num_copied} of {len(self._block_ids)} blocks were offered and copied")
        self._move(ReaderState.CONFIRMING)

    def answered(self, valid: bool) -> None:
        """Raises LeaseExpired when the lease was not valid throughout."""
        self._move(ReaderState.CONFIRMED if valid else ReaderState.DROPPED)
        if not valid:
            raise LeaseExpired(f"the lease ended before its {len(self._block_ids)} blocks were copied")

    def end(self) -> None:
        """Nothing writes any more: what is not confirmed is dropped. Idempotent."""
        if READER_MOVES[self.state]:
            self._move(ReaderState.DROPPED)

    def _move(self, to: ReaderState) -> None:
        self.state = _moved(READER_MOVES, self.state, to)
