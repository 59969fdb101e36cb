"""Which nodes are left alone because they fail: one circuit breaker per instance.

    closed ──session lost, or MAX_FAILURES requests failed in a row──▶ open ──pause over──▶ half open
      ▲                                                                 ▲                      │ one request at a time
      └───────────────────────── first output ──────────────────────────┼──────────────────────┤
                                                                        └── failure: pause x 2 ┘

A refusal for want of room, or because the node drains, is no failure: it says that the node works.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

MAX_FAILURES = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
PROBE_S = 10.0  # a probe that has not told anything for so long stands in no other's way

State = Literal["closed", "open", "half_open"]


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    pause_s: float = 0.0  # 0: closed
    open_until_s: float = 0.0
    probing_until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BreakerView:
    state: State
    num_failures: int
    retry_in_s: float


class Breakers:
    def __init__(self, clock: Callable[[], float] = time.monotonic, on_open: Callable[[], None] = lambda: None) -> None:
        self.on_open = on_open
        self._clock = clock
        self._breakers: dict[str, _Breaker] = {}

    def failed(self, instance_id: str, *, lost: bool = False) -> None:
        """A request failed there; with `lost` it was the session."""
        breaker = self._breakers.setdefault(instance_id, _Breaker())
        breaker.num_failures += 1
        if lost or breaker.pause_s or breaker.num_failures >= MAX_FAILURES:
            was_open = self._clock() < breaker.open_until_s
            if not was_open:  # what fails together counts once
                breaker.pause_s = min(2 * breaker.pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
                breaker.open_until_s = self._clock() + breaker.pause_s
                self.on_open()
            breaker.probing_until_s = 0.0

    def worked(self, instance_id: str) -> None:
        """Output came from there, or a refusal that a healthy node gives."""
        self._breakers.pop(instance_id, None)

    def sent(self, instance_id: str) -> None:
        """A request goes there: in a half-open breaker it is the probe."""
        breaker = self._breakers.get(instance_id)
        if breaker is not None and breaker.pause_s and self._clock() >= breaker.open_until_s:
            breaker.probing_until_s = self._clock() + PROBE_S

    def avoided(self) -> frozenset[str]:
        """Instances that get nothing now: open, or half open with a probe under way."""
        now = self._clock()
        return frozenset(
            name for name, b in self._breakers.items() if b.pause_s and now < max(b.open_until_s, b.probing_until_s)
        )

    def forget_all_but(self, live: Iterable[str]) -> None:
        for name in self._breakers.keys() - set(live):
            del self._breakers[name]

    def views(self) -> dict[str, BreakerView]:
        """Those that have failed since they last worked."""
        now = self._clock()
        return {
            name: BreakerView(
                "closed" if not b.pause_s else "open" if now < b.open_until_s else "half_open",
                b.num_failures,
                round(max(b.open_until_s - now, 0.0), 3),
            )
            for name, b in self._breakers.items()
        }
