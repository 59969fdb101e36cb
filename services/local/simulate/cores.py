"""The cores of one machine that simulated nodes share: one thread each, two for a node that computes alone.

As the real ones do (`common/core_board.py`): while the others of the machine compute nothing, and have not for a
moment, a node is lent an idle core; more nodes than cores get shares by weight, each at most a core. A step's speed
changes whenever another one begins or ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

LINGER_S = 0.05  # so long after its last step a node keeps its core


@dataclass(slots=True)
class _Step:
    """`left_s`: on one core of its own. `lent_speed`: how many times faster it is with a second one."""

    node: str
    left_s: float
    lent_speed: float
    weight: float
    began_s: float
    done: Callable[[float], None]


class Cores:
    """`at(when_s, event)` calls back in simulated time, which `now` tells."""

    def __init__(self, count: int, now: Callable[[], float], at: Callable[[float, Callable[[], None]], None]) -> None:
        self._count = count
        self._now = now
        self._at = at
        self._steps: list[_Step] = []
        self._told_s = 0.0
        self._kept_until: dict[str, float] = {}
        self._version = 0

    def compute(
        self, node: str, seconds: float, lent_speed: float, weight: float, done: Callable[[float], None]
    ) -> None:
        """A step of so many seconds on one core; `done` is told how many it took."""
        self._pass_time()
        self._steps.append(_Step(node, seconds, lent_speed, weight, self._now(), done))
        self._await_next()

    def _speed(self, step: _Step) -> float:
        kept = (until for node, until in self._kept_until.items() if node != step.node)
        if len(self._steps) == 1 and self._count > 1 and all(until <= self._told_s for until in kept):
            return step.lent_speed
        return self._share(step)

    def _share(self, step: _Step) -> float:
        """Of a core: by weight, and what those with a whole core leave goes to the others."""
        left, others = float(self._count), sorted(self._steps, key=lambda one: -one.weight)
        weights = sum(one.weight for one in others)
        for one in others:
            share = min(left * one.weight / weights, 1.0)
            if one is step:
                return share
            left, weights = left - share, weights - one.weight
        raise AssertionError("a step that does not run")

    def _pass_time(self) -> None:
        passed_s = self._now() - self._told_s
        for step in self._steps:
            step.left_s -= passed_s * self._speed(step)
        self._told_s = self._now()

    def _await_next(self) -> None:
        self._version += 1
        if self._steps:
            version = self._version
            left_s = min(step.left_s / self._speed(step) for step in self._steps)
            self._at(self._now() + max(left_s, 0.0), lambda: self._ends(version))

    def _lend(self) -> None:
        """A core may have become free, and what runs be faster from now on."""
        self._pass_time()
        self._await_next()

    def _ends(self, version: int) -> None:
        if version != self._version:  # another step began or ended meanwhile
            return
        self._pass_time()
        first = min(self._steps, key=lambda step: step.left_s / self._speed(step))
        self._steps.remove(first)
        self._kept_until[first.node] = self._now() + LINGER_S
        self._at(self._now() + LINGER_S, self._lend)
        self._await_next()
        first.done(self._now() - first.began_s)
