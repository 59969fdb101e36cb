"""Named places where tests and drills make something go wrong. Off, and all but free, unless an option names some.

    --fail-points "transfer.grpc.chunk=corrupt:0.1, index.lookup=delay:0.3:50, rpc.prefill.reply=kill@20"

    point=action:probability[:milliseconds]     at each passage with this probability (the milliseconds are a delay's)
    point=action@n[:milliseconds]               at the n-th passage, once

`kill` and `stop` are SIGKILL and SIGSTOP to the own process; a stopped one goes on when somebody sends it SIGCONT.

The same point may be named several times. What happens at the n-th passage of a point depends on (seed, point, n)
alone, so a run with the same seed and the same traffic goes wrong in the same way.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass

from kvferry.common.config import nearest
from kvferry.common.errors import ConfigError


class Action(enum.Enum):
    DROP = "drop"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    CORRUPT = "corrupt"
    KILL = "kill"
    STOP = "stop"


_MESSAGE = frozenset((Action.DROP, Action.DELAY, Action.DUPLICATE, Action.KILL))
_CALL = frozenset((Action.DROP, Action.DELAY, Action.KILL))

POINTS: dict[str, frozenset[Action]] = {
    "transfer.grpc.chunk": frozenset(Action),  # owner: each run of blocks that is sent
    "transfer.ucx.run": frozenset(Action),  # owner: the same over ucx
    "transfer.shm.copy": frozenset(  # reader, in the middle of a copy: corrupt goes unnoticed
        (Action.DELAY, Action.CORRUPT, Action.KILL, Action.STOP)
    ),
    "transfer.lease.renew": _MESSAGE,  # reader: "I still copy"
    "transfer.lease.release": _MESSAGE,  # reader: "I have copied"
    "transfer.lease.released": _MESSAGE,  # owner: whether the lease was valid throughout
    "rpc.prefill.start": _MESSAGE,  # reader: the prompt
    "rpc.prefill.reply": _MESSAGE | {Action.CORRUPT},  # owner: accepted, filled, computed, renewed
    "rpc.session.submit": _CALL,  # gateway: a request; twice would be two requests of one name
    "rpc.session.cancel": _MESSAGE,  # gateway: nobody waits for it any more
    "rpc.decode.outputs": frozenset((Action.DELAY, Action.KILL)),  # decode: the tokens of a step
    "node.load": frozenset((Action.DELAY, Action.KILL, Action.STOP)),  # any node: before it reads its model
    "engine.step": frozenset((Action.DELAY, Action.KILL, Action.STOP)),  # any node: before each step
    "index.publish": _CALL | {Action.DUPLICATE},  # node: announce, store, remove; gateway: expect
    "index.lookup": _CALL | {Action.CORRUPT},  # gateway: which nodes live, who holds which blocks; corrupt: too many
}
"""Every point, and what may go wrong there."""

DEFAULT_DELAY_MS = 100.0
_SIGNALS = {Action.KILL: signal.SIGKILL, Action.STOP: signal.SIGSTOP}
_RULE = re.compile(r"([\w.]+)=(\w+)(?::([0-9.]+)|@([0-9]+))(?::([0-9.]+))?")


@dataclass(frozen=True, slots=True)
class Fault:
    action: Action
    delay_s: float


@dataclass(frozen=True, slots=True)
class _Rule:
    fault: Fault
    probability: float
    at: int  # 0: wherever the dice say


class FailPoints:
    """Thread-safe. `hits` counts what was done, by (point, action)."""

    def __init__(self, spec: str = "", seed: int = 0) -> None:
        """Raises ConfigError for an unknown point or action, with the nearest known one, and for a malformed rule."""
        self.hits: Counter[tuple[str, str]] = Counter()
        self._rules: dict[str, list[_Rule]] = {}
        for text in filter(None, map(str.strip, spec.split(","))):
            point, rule = _parse(text)
            self._rules.setdefault(point, []).append(rule)
        self._dice = {point: random.Random(f"{seed}/{point}") for point in self._rules}
        self._passages = {point: itertools.count(1) for point in self._rules}
        self._lock = threading.Lock()

    @property
    def are_on(self) -> bool:
        return bool(self._rules)

    def hit(self, point: str) -> Fault | None:
        """What goes wrong at this passage, if anything. A kill does not return, a stop when the process goes on."""
        if not self._rules or (rules := self._rules.get(point)) is None:
            return None
        with self._lock:
            number, dice = next(self._passages[point]), self._dice[point]
            due = [rule.fault for rule in rules if rule.at == number]
            due += [rule.fault for rule in rules if not rule.at and dice.random() < rule.probability]
            fault = next(iter(due), None)
            if fault is not None:
                self.hits[point, fault.action.value] += 1
        if fault is not None and (signal_number := _SIGNALS.get(fault.action)):
            os.kill(os.getpid(), signal_number)
        return fault

    async def copies(self, point: str) -> int:
        """How often to send a message: 0 dropped, 1, or 2; after a delay if one is due."""
        return await copies(self.hit(point))

    def pause(self, point: str) -> bool:
        """For worker threads: sleeps through a delay. True: spoil the bytes."""
        fault = self.hit(point)
        if fault is not None and fault.action is Action.DELAY:
            time.sleep(fault.delay_s)
        return fault is not None and fault.action is Action.CORRUPT


async def copies(fault: Fault | None) -> int:
    """How often a message is to be sent under this fault; sleeps through a delay."""
    if fault is None:
        return 1
    if fault.action is Action.DELAY:
        await asyncio.sleep(fault.delay_s)
    return {Action.DROP: 0, Action.DUPLICATE: 2}.get(fault.action, 1)


def spoilt(data: bytes) -> bytes:
    """With one byte changed, in the middle."""
    at = len(data) // 2
    return data[:at] + bytes((data[at] ^ 0xFF,)) + data[at + 1 :]


def _parse(text: str) -> tuple[str, _Rule]:
    match = _RULE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"fail point {text!r}: expected point=action:probability[:milliseconds] or point=action@n[:milliseconds]"
        )
    point, name, probability, at, delay_ms = match.groups()
    if point not in POINTS:
        raise ConfigError(f"unknown fail point {point!r}{nearest(point, POINTS)}; there are {', '.join(POINTS)}")
    allowed = {action.value: action for action in Action if action in POINTS[point]}
    if name not in allowed:
        raise ConfigError(
            f"fail point {point}: no action {name!r}{nearest(name, allowed)}; it has {', '.join(allowed)}"
        )
    if probability is not None and not 0 < float(probability) <= 1:
        raise ConfigError(f"fail point {text!r}: the probability must lie above 0 and be at most 1")
    fault = Fault(allowed[name], float(delay_ms or DEFAULT_DELAY_MS) / 1e3)
    return point, _Rule(fault, float(probability or 0), int(at or 0))
