"""Calls that may recurse deeply in native code, where a stack that overflows ends the process unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 256 * 2**20
"""Address space, not memory: only what is used of it is ever touched."""

_stack_size = threading.Lock()


def with_deep_stack(work: Callable[[], T]) -> T:
    """`work()`, in a thread of its own with a stack of `STACK_BYTES`; blocks until it is done.

    Raises what it raises. What is no `Exception` (a panic in native code) comes out as RuntimeError.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as exc:
            failures.append(exc)

    with _stack_size:  # the setting is the process's, and counts when a thread starts
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="deep")
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if not failures:
        return results[0]
    if isinstance(failures[0], Exception):
        raise failures[0]
    raise RuntimeError(f"native code failed: {failures[0]}") from failures[0]
