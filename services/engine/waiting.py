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
        self._counted: dict[Sequence, tuple[int, int]] = {}
        self.num_tokens = self.num_found = 0  # of all here: as many, of which so many will be found computed

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
        most = self._max_num_tokens
        if most is not None and self._seqs and self.num_tokens + seq.num_tokens > most:
            raise Overloaded(
                f"{self.num_tokens} prompt tokens wait on this node: with {seq.num_tokens} more its limit of "
                f"{most} would be passed"
            )
        self.insert(seq)

    def insert(self, seq: Sequence) -> None:
        """One that was here before, or owns blocks already."""
        insort(self._seqs, seq, key=order)
        self.count(seq)

    def count(self, seq: Sequence, num_found: int = 0) -> None:
        """Of one that is here; `num_found`: leading tokens that will probably be found computed."""
        self._forget(seq)
        self._counted[seq] = seq.num_tokens, num_found
        self.num_tokens += seq.num_tokens
        self.num_found += num_found

    def pop(self) -> Sequence:
        """Takes the first one out; those that came before it have been overtaken once more."""
        first = self._seqs.pop(0)
        self._forget(first)
        passed = [seq for seq in self._seqs if seq.arrival_s < first.arrival_s]
        for seq in passed:
            seq.num_overtaken += 1
        if any(seq.num_overtaken == MAX_OVERTAKEN for seq in passed):
            self._seqs.sort(key=order)
        return first

    def remove(self, seq: Sequence) -> None:
        self._seqs.remove(seq)
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        num_tokens, num_found = self._counted.pop(seq, (0, 0))
        self.num_tokens -= num_tokens
        self.num_found -= num_found
