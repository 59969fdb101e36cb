"""Who starts next: sequences that wait for blocks and seats, in order. Plain Python, no tensors.

The order is that of priority (lower first) and then of arrival; under `fcfs` all priorities are alike. So that nobody
starves, a sequence that `MAX_OVERTAKEN` later arrivals have passed stands before all that were passed less often.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from kvferry.common.errors import Overloaded
from kvferry.services.engine.sequence import Sequence

MAX_OVERTAKEN = 100

_FIRST = -(2**31)  # the least priority that travels


def order(seq: Sequence) -> tuple[int, float]:
    """Sorts sequences: whose turn is earlier. The last one is the first to be preempted."""
    return (seq.priority if seq.num_overtaken < MAX_OVERTAKEN else _FIRST), seq.arrival_s


class WaitingQueue:
    """Sequences in `order`, those that are alike as they came. Only `add` keeps the bounds (None: there is none)."""

    def __init__(self, max_num_seqs: int | None = None, max_num_tokens: int | None = None) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_num_tokens = max_num_tokens
        self._seqs: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def first(self) -> Sequence:
        return self._seqs[0]

    def add(self, seq: Sequence) -> None:
        """A new one. Raises Overloaded where that would pass a bound; one prompt alone may have any length."""
        if self._max_num_seqs is not None and len(self) >= self._max_num_seqs:
            raise Overloaded(f"{len(self)} requests wait on this node already: its limit is reached")
        if self._max_num_tokens is not None and self._seqs:
            waiting = sum(one.num_tokens for one in self._seqs)
            if waiting + seq.num_tokens > self._max_num_tokens:
                raise Overloaded(
                    f"{waiting} prompt tokens wait on this node: with {seq.num_tokens} more its limit of "
                    f"{self._max_num_tokens} would be passed"
                )
        self.insert(seq)

    def insert(self, seq: Sequence) -> None:
        """One that was here before, or owns blocks already."""
        insort(self._seqs, seq, key=order)

    def pop(self) -> Sequence:
        """Takes the first one out; those that came before it have been overtaken once more."""
        first = self._seqs.pop(0)
        passed = [seq for seq in self._seqs if seq.arrival_s < first.arrival_s]
        for seq in passed:
            seq.num_overtaken += 1
        if any(seq.num_overtaken == MAX_OVERTAKEN for seq in passed):
            self._seqs.sort(key=order)
        return first

    def remove(self, seq: Sequence) -> None:
        self._seqs.remove(seq)
