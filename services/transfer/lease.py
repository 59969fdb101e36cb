"""Leases, owner's side: which blocks are pinned for which reader, until when. Knows no wire and no engine."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.common.errors import LeaseExpired, Overloaded


@dataclass(slots=True)
class Lease:
    """Only the table changes it. Each block in `block_ids` holds exactly one pin; they are in the order of a prompt."""

    lease_id: str
    reader: str
    for_cached: bool
    expires_at: float
    block_ids: dict[int, None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"lease {_short(self.lease_id)} of {self.reader}"


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    num_open: int = 0
    num_pins: int = 0  # a block under two leases counts twice
    num_cached_pins: int = 0  # those of leases `for_cached`, limited by the cap
    num_opened: int = 0
    num_released: int = 0  # also those that were revoked
    num_expired: int = 0  # opened == open + released + expired


def _short(lease_id: str) -> str:
    """Enough to find it in a log, too little to use it."""
    return lease_id[:8]


class LeaseTable:
    """All leases this node has given. Thread-safe.

    `pin` and `unpin` are called with the table's lock held: they may take the pool's lock, and must not call back.
    A pin that raises leaves the lease as it was. `max_pinned_blocks` caps all leases `for_cached` together.
    """

    def __init__(
        self,
        pin: Callable[[Sequence[int]], None],
        unpin: Callable[[Sequence[int]], None],
        *,
        lease_s: float,
        max_pinned_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pin, self._unpin = pin, unpin
        self._lease_s, self._max_pinned_blocks, self._clock = lease_s, max_pinned_blocks, clock
        self._leases: dict[str, Lease] = {}
        self._lock = threading.Lock()
        self._num_opened = self._num_released = self._num_expired = 0

    def open(self, reader: str, *, for_cached: bool = False) -> Lease:
        """A lease without blocks. Those `for_cached` blocks share the cap; those for a promised prompt have none."""
        with self._lock:
            lease = Lease(secrets.token_hex(16), reader, for_cached, self._clock() + self._lease_s)
            self._leases[lease.lease_id] = lease
            self._num_opened += 1
            return lease

    def extend(self, lease_id: str, block_ids: Sequence[int]) -> None:
        """Pins the blocks that the lease does not cover yet, given parents before children. Does not renew it.

        Raises LeaseExpired, or Overloaded when a lease `for_cached` would pass the cap; then nothing is pinned.
        """
        with self._lock:
            lease = self._live(lease_id)
            new = [b for b in dict.fromkeys(block_ids) if b not in lease.block_ids]
            if lease.for_cached and (pins := self._cached_pins() + len(new)) > self._max_pinned_blocks:
                raise Overloaded(f"{lease}: {pins} cached blocks pinned for peers, allowed {self._max_pinned_blocks}")
            if new:
                self._pin(new)
                lease.block_ids |= dict.fromkeys(new)

    def renew(self, lease_id: str) -> None:
        """Starts its time anew. Raises LeaseExpired when that comes too late."""
        with self._lock:
            self._live(lease_id).expires_at = self._clock() + self._lease_s

    def check(self, lease_id: str, block_ids: Iterable[int]) -> None:
        """Raises LeaseExpired unless the lease is alive and covers all the blocks."""
        with self._lock:
            lease = self._live(lease_id)
            missing = next((b for b in block_ids if b not in lease.block_ids), None)
            if missing is not None:
                raise LeaseExpired(f"{lease} does not cover block {missing}")

    def release(self, lease_id: str) -> bool:
        """Unpins its blocks. True when the lease was valid from its opening until now; a second call returns False."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None:
                return False
            valid = self._clock() < lease.expires_at
            self._close(lease, expired=not valid)
            return valid

    def expire_due(self) -> list[str]:
        """Unpins the blocks of all leases past their deadline; returns their ids."""
        with self._lock:
            now = self._clock()
            due = [lease for lease in self._leases.values() if now >= lease.expires_at]
            for lease in due:
                self._close(lease, expired=True)
            return [lease.lease_id for lease in due]

    def revoke_cached(self) -> list[str]:
        """Unpins the blocks of all leases `for_cached`, for work that waits for blocks; returns their ids.

        Their readers hear of it when they renew or release, as of any lease that was not valid throughout.
        """
        with self._lock:
            revoked = [lease for lease in self._leases.values() if lease.for_cached]
            for lease in revoked:
                self._close(lease, expired=False)
            return [lease.lease_id for lease in revoked]

    def release_all(self) -> None:
        """For shutdown: no lease outlives its node."""
        with self._lock:
            for lease in list(self._leases.values()):
                self._close(lease, expired=False)

    @property
    def num_open(self) -> int:
        return len(self._leases)

    def counts(self) -> LeaseCounts:
        with self._lock:
            return LeaseCounts(
                num_open=len(self._leases),
                num_pins=sum(len(lease.block_ids) for lease in self._leases.values()),
                num_cached_pins=self._cached_pins(),
                num_opened=self._num_opened,
                num_released=self._num_released,
                num_expired=self._num_expired,
            )

    def _cached_pins(self) -> int:
        return sum(len(lease.block_ids) for lease in self._leases.values() if lease.for_cached)

    def _live(self, lease_id: str) -> Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseExpired(f"lease {_short(lease_id)} is unknown: never given, released or expired")
        if (late_s := self._clock() - lease.expires_at) >= 0:
            raise LeaseExpired(f"{lease} expired {late_s:.1f} s ago")
        return lease

    def _close(self, lease: Lease, *, expired: bool) -> None:
        del self._leases[lease.lease_id]
        if expired:
            self._num_expired += 1
        else:
            self._num_released += 1
        if lease.block_ids:
            self._unpin(list(lease.block_ids))  # in their order: who evicts them takes children before parents
