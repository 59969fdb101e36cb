"""How many prompt tokens are still to be computed, as far as can be told: plain Python, no policy.

One that waits will find what is cached when its turn comes, and what those before it compute. That is estimated when it
begins to wait, so that the sum is a running one; a walk over all puts right what has come and gone since.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence as List

from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.sequence import Sequence, Status
from kvferry.services.engine.waiting import WaitingQueue


class Backlog:
    """Over the scheduler's own lists, which it does not change. Not thread-safe, as they are not."""

    def __init__(self, pool: BlockPool, running: List[Sequence], received: WaitingQueue, waiting: WaitingQueue) -> None:
        self._pool = pool
        self._running, self._received, self._waiting = running, received, waiting
        self._coming: set[bytes] = set()  # blocks that sequences here have computed or will

    @property
    def num_tokens(self) -> int:
        """Of running prompts too, but not what a decode step computes."""
        running = (seq.num_uncomputed_tokens for seq in self._running)
        received = (seq.num_uncomputed_tokens for seq in self._received)
        waiting = self._waiting.num_tokens - self._waiting.num_found
        return sum(count for count in running if count > 1) + sum(received) + waiting

    def entered(self, seq: Sequence) -> None:
        """It has just been put among those that wait."""
        if len(self._waiting) == 1 and not self._running and not self._received:
            self._coming.clear()
        self._waiting.count(seq, self._num_found(seq))
        self._coming.update(seq.names)

    def walk(self) -> list[tuple[int, int]]:
        """Each prompt's tokens `[start, end)` that are still to be computed. Estimates anew for all that wait."""
        self._coming = set()
        due: list[tuple[int, int]] = []
        for seq in (*self._running, *self._received, *self._waiting):
            start = seq.num_computed_tokens
            if not seq.block_table:
                self._waiting.count(seq, start := self._num_found(seq))
            if seq.num_tokens - start > (seq.status is Status.RUNNING):
                self._coming.update(seq.names)
                due.append((start, seq.num_tokens))
        return due

    def _num_found(self, seq: Sequence) -> int:
        names = seq.names[: seq.num_cacheable_blocks]
        found = bisect.bisect(names, False, key=lambda name: not (name in self._coming or self._pool.holds(name)))
        return found * seq.block_size
