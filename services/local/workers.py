"""`kvferry gateway --workers N`: processes that share ports, started again when they die.

Each worker listens with sockets of its own (SO_REUSEPORT) once it can serve, and the kernel spreads connections over
those that listen. (One socket for all gives a burst to whoever wakes first: 20 of 20 connections.) Counts live in a
folder of files that prometheus_client shares between the workers; whoever takes a dead worker's place counts on in its
files, and its gauges are gone.

    SIGTERM, SIGINT   no worker accepts any more, each drains            once more   each ends its requests at once
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client.multiprocess import mark_process_dead

from kvferry.common.config import Config
from kvferry.common.errors import ConfigError, StartupError
from kvferry.common.log import setup_logging
from kvferry.common.stop_signals import stop_signals
from kvferry.services.local import launch
from kvferry.services.local.flags import config_environ
from kvferry.services.local.launch import CONFIG_EXIT
from kvferry.services.local.supervisor import Backoff, describe

log = logging.getLogger("kvferry.gateway")

FOLDER_PREFIX = "kvferry-metrics-"
UNLOCKED_S = 60.0  # a folder may have been made and not locked yet for less than this
AFTER_DRAIN_S = 10.0  # for a worker to end by itself, beyond its grace period
COMMAND = (sys.executable, "-P", "-m", "kvferry.services.local.cli", "gateway")


def main(config: Config) -> int:
    """Runs until SIGTERM or SIGINT: 0 when all workers ended well. Raises StartupError for the CLI to print."""
    from kvferry.services.gateway.server import addresses, bind

    setup_logging(config.cluster.log_level, config.cluster.log_format)
    if config.cluster.redis_url is None:
        raise ConfigError("redis_url is not set: pass --redis-url, or use `kvferry up`, which brings a Redis along")

    def more() -> list[socket.socket]:
        return [bind(host, port, shared=True) for host, port in taken]

    taken = []
    for host, port in addresses(config.gateway):
        with bind(host, port) as alone:  # else another gateway of ours on this port would go unnoticed
            taken.append((host, int(alone.getsockname()[1])))
    with counts_folder(Path(tempfile.gettempdir())) as folder:
        return asyncio.run(Workers(config, more, folder).run())


@contextmanager
def counts_folder(parent: Path) -> Iterator[str]:
    """An empty folder that is locked while this process lives. Those of processes that were killed go, too."""
    for left in parent.glob(FOLDER_PREFIX + "*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > UNLOCKED_S and (fd := _locked(left)) is not None:
                os.close(fd)
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=parent) as folder:
        fd = _locked(Path(folder))
        try:
            yield folder
        finally:
            if fd is not None:
                os.close(fd)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None: another process has it. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as exc:
        os.close(fd)
        if isinstance(exc, BlockingIOError):
            return None
        raise
    return fd


class Workers:
    def __init__(
        self, config: Config, more: Callable[[], list[socket.socket]], folder: str, backoff: Backoff | None = None
    ) -> None:
        """`more` makes one worker's sockets, which do not listen yet. `folder` is empty."""
        self._config = config
        self._more = more
        self._reserved = more()  # keeps the ports ours while no worker lives
        self._folder = folder
        self._num_workers = config.gateway.workers
        self._longest_drain_s = config.node.drain_s + AFTER_DRAIN_S
        self._backoff = backoff or Backoff()
        self._processes: dict[int, asyncio.subprocess.Process] = {}  # by worker
        self._stopping = asyncio.Event()
        self._kill: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        """Returns when no worker is left, whatever ended them."""
        with stop_signals(self._stop, signal.SIGTERM, signal.SIGINT):
            tasks = [asyncio.create_task(self._keep(number)) for number in range(self._num_workers)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.exception() for task in done):
                self._stop()
            try:
                statuses = await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                if self._kill is not None:
                    self._kill.cancel()
        for status in statuses:
            if isinstance(status, BaseException):
                raise status
        return int(any(statuses))

    def _stop(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            for reserved in self._reserved:
                reserved.close()
            self._kill = asyncio.get_running_loop().call_later(self._longest_drain_s, self._signal, signal.SIGKILL)
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            _send(process, number)

    async def _keep(self, number: int) -> int:
        """One worker, again and again until `_stop`: the last exit status.

        Raises StartupError when it ends with CONFIG_EXIT before it has run once: the operator must act.
        """
        num_failures, num_runs = 0, 0
        while True:
            begun, num_runs = time.monotonic(), num_runs + 1
            status = await self._run_once(number)
            if self._stopping.is_set():
                return status
            if status == CONFIG_EXIT and num_runs == 1:
                raise StartupError("a gateway worker could not start: it has said why")
            lived_s = time.monotonic() - begun
            num_failures = 1 if lived_s >= self._backoff.stable_s else num_failures + 1
            delay_s = self._backoff.delay_s(num_failures)
            said = (number, describe(status), lived_s, delay_s)
            log.error("worker %d %s after %.1f s, started again in %g s", *said)
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
                    return 0

    async def _run_once(self, number: int) -> int:
        process = await self._spawn(number)
        self._processes[number] = process
        log.info("worker %d has pid %d", number, process.pid)
        try:
            if self._stopping.is_set():  # it came while the process was being made
                _send(process, signal.SIGTERM)
            return await process.wait()
        finally:
            del self._processes[number]
            mark_process_dead(number, self._folder)  # type: ignore[no-untyped-call]

    async def _spawn(self, number: int) -> asyncio.subprocess.Process:
        launcher = (sys.executable, "-I", "-S", str(Path(launch.__file__)))
        sockets = self._more()
        try:
            fds = tuple(each.fileno() for each in sockets)
            gateway = self._config.gateway.model_copy(update={"listen_fds": fds, "worker_number": number})
            environ = config_environ(self._config.model_copy(update={"gateway": gateway}))
            return await asyncio.create_subprocess_exec(
                *(*launcher, str(os.getpid()), "0", *COMMAND),
                stdin=asyncio.subprocess.DEVNULL,
                env=environ | {"PROMETHEUS_MULTIPROC_DIR": self._folder},
                pass_fds=fds,
                process_group=0,
            )
        finally:
            for each in sockets:
                each.close()


def _send(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(number)
