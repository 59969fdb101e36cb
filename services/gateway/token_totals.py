"""What every token adds to the metrics, kept as plain numbers: prometheus_client's cost more than the token itself."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import Counter, Histogram, Metric
from prometheus_client.registry import Collector


class CountedHistogram(Histogram):
    """Takes observations that have been counted already."""

    @property
    def bounds(self) -> tuple[float, ...]:
        """Upper ones of the buckets; the last is infinite."""
        return tuple(self._upper_bounds)

    def add(self, counts: Sequence[int], total: float) -> None:
        """`counts`: of each bucket alone. `total`: the sum of what was observed."""
        for bucket, count in zip(self._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        self._sum.inc(total)


class TokenTotals(Collector):
    """Noted by one thread. `flush`, from any, adds what has come since to the metrics, which belong to this alone.

    Collecting them does so, too; where another process is collected in this one's stead, something else must.
    """

    def __init__(self, tokens: Counter, gaps: CountedHistogram) -> None:
        """Both of no registry."""
        self._tokens, self._gaps = tokens, gaps
        self._bounds = gaps.bounds
        self._num_tokens, self._seconds, self._counts = 0, 0.0, [0] * len(self._bounds)  # these only ever grow
        self._flushed = 0, 0.0, list(self._counts)
        self._lock = threading.Lock()

    def note(self, num_tokens: int, gap_s: float | None) -> None:
        """An output of one choice, and how long after the one before it (None: it is the first)."""
        self._num_tokens += num_tokens
        if gap_s is not None:
            self._seconds += gap_s
            self._counts[bisect_left(self._bounds, gap_s)] += 1

    def flush(self) -> None:
        with self._lock:
            num_tokens, seconds, counts = self._flushed
            self._flushed = now = self._num_tokens, self._seconds, list(self._counts)
            self._tokens.inc(now[0] - num_tokens)
            self._gaps.add([new - old for new, old in zip(now[2], counts, strict=True)], now[1] - seconds)

    def describe(self) -> Iterable[Metric]:
        return (*self._tokens.describe(), *self._gaps.describe())

    def collect(self) -> Iterable[Metric]:
        self.flush()
        return (*self._tokens.collect(), *self._gaps.collect())
