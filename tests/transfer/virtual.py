"""A clock that the test sets, an event loop that runs until nothing is left to do, and copies that wait to be made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import Any
from weakref import WeakSet

from tests.transfer.wire import NODE


class VirtualLoop(asyncio.SelectorEventLoop):
    """Sleeps and timeouts end when `advance` has passed them. Knows which node instance each task belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.errors: list[tuple[str, dict[str, Any]]] = []
        self._tasks: dict[str, WeakSet[asyncio.Task[Any]]] = {}
        self.set_task_factory(self._make_task)
        self.set_exception_handler(lambda _, context: self.errors.append((NODE.get(), context)))

    def time(self) -> float:
        return self.now

    def settle(self) -> None:
        """Runs until every task waits for something that only the test can bring."""
        for _ in range(10_000):
            self.call_soon(self.stop)
            self.run_forever()
            due = self._scheduled and self._scheduled[0].when() <= self.now  # type: ignore[attr-defined]
            if not self._ready and not due:  # type: ignore[attr-defined]
                return
        raise AssertionError("the loop never comes to rest")

    def advance(self, seconds: float) -> None:
        """In small steps: a timer that is set by another one comes when it is due, not at the end."""
        stop = self.now + seconds
        while self.now < stop:
            self.now = min(self.now + 0.25, stop)
            self.settle()

    def tasks_of(self, instance: str) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks.get(instance, ()) if not task.done()]

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, context=context)
        self._tasks.setdefault((context or copy_context()).get(NODE, ""), WeakSet()).add(task)
        return task


class HeldJobs:
    """An executor whose jobs begin, and later run, when the test says so. A job that has begun cannot be cancelled."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self._begun: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: job(*args)))
        return future

    def shutdown(self, wait: bool = False) -> None:
        """Nothing to end."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._begun)

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    def begin(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._begun += [one for one in waiting if one[0].set_running_or_notify_cancel()]

    def run(self, around: Callable[[Callable[[], Any]], Any]) -> None:
        """Begins and runs all there are, each inside `around`."""
        self.begin()
        begun, self._begun = self._begun, []
        for future, job in begun:
            try:
                future.set_result(around(job))
            except Exception as exc:
                future.set_exception(exc)
