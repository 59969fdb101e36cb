"""What the operations page shows of requests: the last ones that ended, and latencies of the last minutes.

Bounded, in this process alone, and without a word of any prompt, answer or key.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvferry.common.requests import RequestTimes

NUM_REMEMBERED = 256
WINDOW_S = 300.0
SLOT_S = 5.0
_STEP = math.log(1.05)  # neighbouring buckets of a latency differ by 5 %
_FINEST_S = 1e-5
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One HTTP request that has ended. Node ids are "" where none was reached, or decode computed the prompt itself.

    `ended`: its finish reason ("length+stop" where choices differ), "abort" when the client left, or the error's code.
    `times` and `first_token_s` (None: no token came) are those of its first prompt's first token.
    """

    request_id: str
    kind: str
    ended_at: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    decode: str
    prefill: str
    num_attempts: int
    times: RequestTimes
    first_token_s: float | None
    total_s: float
    ended: str
    is_error: bool


@dataclass(slots=True)
class _Slot:
    """What happened in `SLOT_S` seconds."""

    number: int
    num_tokens: int = 0
    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token: dict[int, int] = field(default_factory=dict)  # bucket -> count
    inter_token: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds, to 5 %. None while there is nothing to tell from."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class WindowStats:
    """Of the last `WINDOW_S` seconds; `tokens_per_s` of the last few."""

    window_s: float
    num_requests: int
    num_errors: int
    prompt_tokens: int
    cached_tokens: int
    tokens_per_s: float
    first_token: Latencies
    inter_token: Latencies


class Recent:
    """Noting is a few additions: it stands in every token's way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_ended = 0  # since the start; the newest of `requests` has this number
        self.requests: deque[RecentRequest] = deque(maxlen=NUM_REMEMBERED)  # oldest first
        self._clock = clock
        self._started_at = clock()
        self._slot_ends_at = self._started_at
        self._slots: deque[_Slot] = deque(maxlen=math.ceil(WINDOW_S / SLOT_S))

    def first_token(self, seconds: float) -> None:
        _count(self._slot().first_token, seconds)

    def tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """An output of one choice, and how long after the one before it (None: it is the first)."""
        slot = self._slot()
        slot.num_tokens += num_tokens
        if gap_s is not None:
            _count(slot.inter_token, gap_s)

    def ended(self, request: RecentRequest) -> None:
        self.num_ended += 1
        self.requests.append(request)
        slot = self._slot()
        slot.num_requests += 1
        slot.num_errors += request.is_error
        slot.prompt_tokens += request.prompt_tokens
        slot.cached_tokens += request.cached_tokens

    def stats(self) -> WindowStats:
        now = self._slot().number
        slots = [slot for slot in self._slots if slot.number > now - WINDOW_S / SLOT_S]
        return WindowStats(
            window_s=WINDOW_S,
            num_requests=sum(slot.num_requests for slot in slots),
            num_errors=sum(slot.num_errors for slot in slots),
            prompt_tokens=sum(slot.prompt_tokens for slot in slots),
            cached_tokens=sum(slot.cached_tokens for slot in slots),
            tokens_per_s=round(self._rate(slots, now), 1),
            first_token=_latencies(slot.first_token for slot in slots),
            inter_token=_latencies(slot.inter_token for slot in slots),
        )

    def _rate(self, slots: list[_Slot], now: int) -> float:
        elapsed_s = self._clock() - self._started_at
        spanned_s = min(elapsed_s, elapsed_s - now * SLOT_S + SLOT_S)
        return sum(slot.num_tokens for slot in slots if slot.number >= now - 1) / max(spanned_s, 1.0)

    def _slot(self) -> _Slot:
        if (now := self._clock()) >= self._slot_ends_at:
            number = int((now - self._started_at) / SLOT_S)
            self._slots.append(_Slot(number))
            self._slot_ends_at = self._started_at + (number + 1) * SLOT_S
        return self._slots[-1]


def _count(buckets: dict[int, int], seconds: float) -> None:
    bucket = math.ceil(math.log(seconds / _FINEST_S) / _STEP) if seconds > _FINEST_S else 0
    buckets[bucket] = buckets.get(bucket, 0) + 1


def _latencies(parts: Iterable[dict[int, int]]) -> Latencies:
    """Each quantile is the upper end of the bucket that it falls in."""
    counts: dict[int, int] = {}
    for part in parts:
        for bucket, count in part.items():
            counts[bucket] = counts.get(bucket, 0) + count
    return Latencies(*(_quantile(counts, share) for share in QUANTILES))


def _quantile(counts: dict[int, int], share: float) -> float | None:
    rank = math.ceil(share * sum(counts.values()))
    for bucket in sorted(counts):
        rank -= counts[bucket]
        if rank <= 0:
            return float(f"{_FINEST_S * math.exp(bucket * _STEP):.3g}")
    return None
