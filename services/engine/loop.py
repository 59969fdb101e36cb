"""The thread that owns the engine, and the asyncio side of it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

from kvferry.common.fail_points import FailPoints
from kvferry.services.engine.engine import Engine

log = logging.getLogger("kvferry.engine")

STOP_S = 10.0


class EngineLoop:
    """Steps the engine in a thread of its own until stopped.

    `on_failure` is called in the event loop when the engine itself breaks (an unbalanced account, a bug in booking):
    its state can then not be trusted, and the process must end. `on_idle` is called in its thread before each wait.
    """

    def __init__(
        self,
        engine: Engine,
        on_failure: Callable[[BaseException], None],
        fail_points: FailPoints | None = None,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self._fail_points = fail_points or FailPoints()
        self._step_began_s: float | None = None
        self._on_failure, self._on_idle = on_failure, on_idle
        self._loop = asyncio.get_running_loop()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def step_s(self) -> float:
        """For how many seconds the running step has run; 0.0 between steps."""
        began = self._step_began_s
        return 0.0 if began is None else time.monotonic() - began

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Returns after the running step, or when that has taken too long. A second call does nothing more."""
        self._stopping = True
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_S)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step_began_s = time.monotonic()
                self._fail_points.pause("engine.step")
                has_worked = self.engine.step()
                self._step_began_s = None
                if not has_worked:
                    if self._on_idle is not None:
                        self._on_idle()
                    self.engine.wait_for_work(0.5)
        except BaseException as exc:
            log.exception("the engine loop broke")
            self._loop.call_soon_threadsafe(self._on_failure, exc)
