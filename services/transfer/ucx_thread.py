"""One thread that owns a UCX worker; each side of transport `ucx` has one. Knows nothing of blocks, leases or peers.

All calls into UCX are made here. When nothing can go on, the thread sleeps until UCX or another thread wakes it. It
never spins, not even between two messages of a transfer: over TCP that costs CPU time and gains nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kvferry.common.errors import ConfigError, TransferFailed
from kvferry.services.transfer.copier import Blocks

log = logging.getLogger("kvferry.transfer")

Endpoint = Any
Request = Any

SETTINGS = {
    "TLS": "^cuda",  # memory of a GPU is never touched here
    "KEEPALIVE_INTERVAL": "2s",  # a silent peer is asked so soon, not after 20 s
    "RNDV_THRESH": "64k",  # a run goes from the sender's memory to the receiver's;
    "RNDV_SCHEME": "put_zcopy",  # what UCX picks by itself over TCP copies it once or twice on the way
}
"""Of UCX, where the user has set nothing else."""

_LOOK_S = 0.05
"""Deadlines of what is open are looked at this often."""
_IDLE_S = 1.0
"""Endpoints whose peer is gone are looked for this often."""
_GOODBYE_S = 0.02
_NUM_STEPS = 8
"""Of UCX, between two looks at what has come: each takes some microseconds, or as long as it takes to move 100 kB."""


def load_ucxx() -> Any:
    """The low-level module of ucxx. Raises ConfigError that says how to get it.

    What the import writes into the environment is taken back: ucxx's settings are made for GPUs, and one of them,
    UCX_MAX_RNDV_RAILS=1, can halve the rate over TCP. UCX reads the environment only when a thread starts.
    """
    before = set(os.environ)
    try:
        return importlib.import_module("ucxx._lib.libucxx")
    except (ImportError, OSError) as exc:  # not installed, or a library of its own is missing
        raise ConfigError(
            f"transport 'ucx' needs ucxx ({exc}): pip install 'kvferry[ucx]', or leave ucx out of --transports"
        ) from exc
    finally:
        for name in set(os.environ) - before:
            if name.startswith("UCX_"):
                del os.environ[name]


@dataclass(frozen=True, slots=True)
class Posted:
    """A send or receive under way, and the memory that UCX may touch until it has completed."""

    request: Request
    memory: Blocks

    def has_ended(self) -> bool:
        """Raises TransferFailed when it failed."""
        if not self.request.completed:
            return False
        try:
            self.request.check_error()
        except Exception as exc:
            raise TransferFailed(f"ucx: {exc}") from exc
        return True


class Side(Protocol):
    """What the thread works for, in the thread."""

    @property
    def is_open(self) -> bool:
        """Whether it waits for a message that will come soon, or else a deadline passes."""

    def tick(self) -> bool:
        """Goes a step on with whatever can go on; whether anything could."""

    def ended(self, why: str) -> None:
        """The thread ends: everything open fails, every endpoint is retired."""


class UcxThread:
    """`call` may be used from any thread, everything else only in jobs and in the side's methods."""

    def __init__(self, name: str, side: Side) -> None:
        self._ucxx = load_ucxx()
        self._array = importlib.import_module("ucxx._lib.arr").Array
        self._side = side
        feature = self._ucxx.Feature
        config = {name: os.environ.get(f"UCX_{name}", value) for name, value in SETTINGS.items()}
        try:
            self._context = self._ucxx.UCXContext(config, feature_flags=(feature.TAG, feature.AM, feature.WAKEUP))
            self._worker = self._ucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except Exception as exc:  # none of ucxx's own errors has a base that its Python side names
            raise TransferFailed(f"ucx does not start: {exc}") from exc
        self._jobs: deque[Callable[[], None]] = deque()
        self._limbo: list[Posted] = []  # of retired endpoints: UCX has not let go of the memory yet
        self._closing = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # of `_closing` and `_wake_fd` against `call`
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{name}", daemon=True)
        self._thread.start()

    def call(self, job: Callable[[], None]) -> None:
        """Has `job` run in the thread. Raises TransferFailed when it has ended."""
        with self._lock:
            if self._closing:
                raise TransferFailed("ucx is closed")
            self._jobs.append(job)
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Ends the thread and waits for its end. Idempotent."""
        with self._lock:
            if not self._closing:
                self._closing = True
                os.eventfd_write(self._wake_fd, 1)
        self._thread.join()

    # ---- in the thread

    def listen(self, accept: Callable[[Endpoint], None]) -> Any:
        """A listener on any free port, as long as the object is kept."""
        return self._ucxx.UCXListener.create(self._worker, 0, accept, deliver_endpoint=True)

    def connect(self, host: str, port: int) -> Endpoint:
        return self._ucxx.UCXEndpoint.create(self._worker, host, port, True)

    def send_message(self, endpoint: Endpoint, message: bytes) -> Posted:
        memory = np.frombuffer(message, dtype=np.uint8)
        return Posted(endpoint.am_send(self._array(memory)), memory)

    def send(self, endpoint: Endpoint, memory: Blocks, tag: int) -> Posted:
        return Posted(endpoint.tag_send(self._array(memory), self._ucxx.UCXXTag(tag)), memory)

    def receive(self, endpoint: Endpoint, memory: Blocks, tag: int) -> Posted:
        return Posted(endpoint.tag_recv(self._array(memory), self._ucxx.UCXXTag(tag)), memory)

    def retire(self, endpoint: Endpoint, posted: Iterable[Posted]) -> None:
        """Closes the endpoint by force, which cancels what is posted on it. Its memory is kept until that is done."""
        with contextlib.suppress(Exception):  # it may be broken in any way
            endpoint.close_blocking()
        self._limbo += posted

    def _run(self) -> None:
        why = "closed"
        try:
            self._loop()
        except Exception as exc:
            log.exception("transport ucx ends")
            why = f"its thread failed: {exc}"
        with self._lock:
            self._closing = True
        self._jobs.clear()
        try:
            self._side.ended(why)
            self._say_goodbye()
        finally:
            _HELD.extend(self._limbo)
            os.close(self._wake_fd)

    def _loop(self) -> None:
        with select.epoll() as poll:
            poll.register(self._worker.epoll_file_descriptor, select.EPOLLIN)
            poll.register(self._wake_fd, select.EPOLLIN)
            while not self._closing:
                if self._progress() | self._side.tick() or not self._worker.arm():
                    continue
                ready = poll.poll(_LOOK_S if self._side.is_open or self._let_go() else _IDLE_S)
                if any(fd == self._wake_fd for fd, _ in ready):
                    os.eventfd_read(self._wake_fd)

    def _progress(self) -> bool:
        """Whether anything happened."""
        happened = False
        for _ in range(_NUM_STEPS):
            if not self._worker.progress_once():
                break
            happened = True
        while self._jobs:
            self._jobs.popleft()()
            happened = True
        return happened

    def _say_goodbye(self) -> None:
        """Peers hear of a closed endpoint by progress alone: until no memory is in use, and a moment beyond."""
        until = time.monotonic() + _IDLE_S
        while self._let_go() and time.monotonic() < until:
            self._worker.progress()
        until = time.monotonic() + _GOODBYE_S
        while time.monotonic() < until:
            if not self._worker.progress_once():
                time.sleep(0.001)

    def _let_go(self) -> bool:
        """Forgets the memory of what has completed by now; whether any is left."""
        self._limbo = [posted for posted in self._limbo if not posted.request.completed]
        return bool(self._limbo)


_HELD: list[Posted] = []
"""Memory that UCX had not let go of when its thread ended: kept for good, so that nothing else is written to."""
