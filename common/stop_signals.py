"""What a process does with the signals that end it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_signals(on_signal: Callable[[], None], *signals: signal.Signals) -> Iterator[None]:
    """While it is open, every one of `signals` calls `on_signal` in the running event loop; then they are ignored.

    For what runs until the process ends: the interpreter takes a while to end, and a signal that is repeated meanwhile
    (an operator's second look, an init system that signals the group and the process) must not turn the exit status of
    a process that has drained into "killed". Main thread only.
    """
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
