"""A deadline that moves with every token and hardly ever passes: one timer, re-armed only when it goes off.

`asyncio.timeout` around every wait costs as much as the token itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `on_passed` once when the time set last has passed. Close it; what happens after that is nothing."""

    __slots__ = ("_at", "_loop", "_on_passed", "_timer")

    def __init__(self, on_passed: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_passed = on_passed
        self._at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float | None) -> None:
        """From now; None: no deadline until set again."""
        if seconds is None:
            self._at = None
            return
        self._at = self._loop.time() + seconds
        if self._timer is None or self._at < self._timer.when():
            self._arm(self._at)

    def close(self) -> None:
        self._at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._at is None:
            return
        if self._loop.time() < self._at:
            self._arm(self._at)
        else:
            self._at = None
            self._on_passed()
