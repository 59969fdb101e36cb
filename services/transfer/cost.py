"""Whether moving cached blocks beats computing them: a pure rule, and the rate per peer that it needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

START_BYTES_PER_S = 250e6
"""Of a link that was never measured, nor any other: two gigabits."""
START_TOKENS_PER_S = 1000.0
HAND_OVER_S = 0.005
"""What a pull costs beside its bytes: a stream, its replies, the confirmation."""
_FORGET_S = 60.0
_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds until the same blocks are here, by either way."""

    move_s: float
    compute_s: float

    @property
    def moving_is_cheaper(self) -> bool:
        return self.move_s < self.compute_s

    def __str__(self) -> str:
        return f"moving {self.move_s * 1e3:.1f} ms, computing {self.compute_s * 1e3:.1f} ms"


def estimate(num_blocks: int, block_bytes: int, block_size: int, bytes_per_s: float, tokens_per_s: float) -> Estimate:
    """`tokens_per_s` 0: not measured yet. Queues are left out: moving lengthens none of them, computing may."""
    rate = tokens_per_s or START_TOKENS_PER_S
    return Estimate(HAND_OVER_S + num_blocks * block_bytes / bytes_per_s, num_blocks * block_size / rate)


class Bandwidth:
    """Bytes per second from each peer, exponentially weighted.

    What is older than a minute is forgotten, and at once what a link did that then broke: a link that was slow once is
    tried again, or nothing would measure it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._measured: dict[str, tuple[float, float]] = {}  # instance id -> rate, when

    def note(self, instance_id: str, num_bytes: int, seconds: float) -> None:
        now, rate = self._clock(), num_bytes / max(seconds, 1e-6)
        self._measured = {peer: (r, at) for peer, (r, at) in self._measured.items() if now - at < _FORGET_S}
        if instance_id in self._measured:
            old = self._measured[instance_id][0]
            rate = old + _WEIGHT * (rate - old)
        self._measured[instance_id] = rate, now

    def forget(self, instance_id: str) -> None:
        self._measured.pop(instance_id, None)

    def of(self, instance_id: str) -> float:
        """Measured; of an unknown peer, what the slowest known one does."""
        return self._fresh().get(instance_id) or self.slowest or START_BYTES_PER_S

    @property
    def slowest(self) -> float:
        """0 while none is known."""
        return min(self._fresh().values(), default=0.0)

    def _fresh(self) -> dict[str, float]:
        now = self._clock()
        return {peer: rate for peer, (rate, at) in self._measured.items() if now - at < _FORGET_S}
