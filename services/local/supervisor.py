"""Runs programs, keeps them running, and ends them in order. Knows nothing of what they do.

    start -> [running -> ready] -> exit -> back-off -> start ...        until `stop`
                              \\-> exit status 2 before it was ever ready: the operator must act, nothing is restarted

Each child leads a process group of its own (a terminal's Ctrl-C reaches only the supervisor) and dies with us.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.common.errors import StartupError
from kvferry.services.local import launch
from kvferry.services.local.console import Console
from kvferry.services.local.launch import CONFIG_EXIT

TAIL_LINES = 20
READY_CHECK_S = 0.2


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    command: tuple[str, ...]
    is_ready: Callable[[], Awaitable[bool]]  # must answer within about a second, and not raise
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    niceness: int = 0
    grace_s: float = 10.0  # from SIGTERM to SIGKILL
    quiet: bool = False  # its lines are shown only when it has failed


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause before a restart, doubled with each failure in a row; a run of `stable_s` starts the count anew."""

    first_s: float = 0.5
    longest_s: float = 30.0
    stable_s: float = 60.0

    def delay_s(self, num_failures: int) -> float:
        return min(self.longest_s, self.first_s * 2.0 ** min(num_failures - 1, 32))


class Child:
    """One program and its present process."""

    def __init__(self, program: Program, console: Console, backoff: Backoff) -> None:
        self.program = program
        self.ready = asyncio.Event()
        self._console = console
        self._backoff = backoff
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._was_ready = False

    async def run(self) -> None:
        """Returns after `stop`, `kill` or cancellation, when no process is left.

        Raises StartupError when the program could not be started or ended with CONFIG_EXIT before it was ever ready.
        """
        num_failures = 0
        try:
            while not self._stopping.is_set():
                begun = time.monotonic()
                status = await self._run_once()
                if self._stopping.is_set():
                    return
                if status == CONFIG_EXIT and not self._was_ready:
                    raise StartupError(f"{self.program.name}: {self._last_line()}")
                lived_s = time.monotonic() - begun
                num_failures = 1 if lived_s >= self._backoff.stable_s else num_failures + 1
                await self._pause(status, lived_s, self._backoff.delay_s(num_failures))
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """SIGTERM, then after the grace period SIGKILL; returns when the process is gone."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self.program.grace_s):
                await self._ended.wait()
        except TimeoutError:
            self._console.say(f"{self.program.name} did not end within {self.program.grace_s:g} s: killed")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        self._stopping.set()
        self._signal(signal.SIGKILL)

    def _signal(self, sig: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if sig is signal.SIGKILL:
                    os.killpg(self._process.pid, sig)
                else:
                    self._process.send_signal(sig)

    async def _run_once(self) -> int:
        """One process from start to end: its exit status."""
        read_end, write_end = os.pipe()
        try:
            process = await self._spawn(write_end)
        except OSError as exc:
            os.close(read_end)
            raise StartupError(f"{self.program.name}: cannot run {self.program.command[0]}: {exc.strerror}") from exc
        finally:
            os.close(write_end)
        self._process = process
        pump = asyncio.create_task(self._pump(read_end))
        watch = asyncio.create_task(self._watch_ready())
        try:
            if self._stopping.is_set():  # `stop` came while the process was being made
                self._signal(signal.SIGTERM)
            return await process.wait()
        finally:
            watch.cancel()
            with contextlib.suppress(ProcessLookupError):  # what it left in its group
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            self.ready.clear()
            await asyncio.wait([pump], timeout=1.0)
            pump.cancel()
            await asyncio.gather(pump, watch, return_exceptions=True)

    async def _spawn(self, output: int) -> asyncio.subprocess.Process:
        launcher = (sys.executable, "-I", "-S", str(Path(launch.__file__)))
        return await asyncio.create_subprocess_exec(
            *(*launcher, str(os.getpid()), str(self.program.niceness), *self.program.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=self.program.environ,
            process_group=0,
        )

    async def _pump(self, read_end: int) -> None:
        """Passes the process's lines on until nobody holds the other end of the pipe."""
        reader = asyncio.StreamReader()
        pipe = os.fdopen(read_end, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            rest = b""
            while chunk := await reader.read(2**16):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._show(line)
            if rest:
                self._show(rest)
        finally:
            transport.close()

    def _show(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self._tail.append(text)
        if not self.program.quiet:
            self._console.log(self.program.name, text)

    async def _watch_ready(self) -> None:
        begun = time.monotonic()
        while not await self.program.is_ready():  # noqa: ASYNC110  (another process: no event)
            await asyncio.sleep(READY_CHECK_S)
        self._was_ready = True
        self.ready.set()
        self._console.say(f"{self.program.name} ready after {time.monotonic() - begun:.1f} s")

    async def _pause(self, status: int, lived_s: float, delay_s: float) -> None:
        self._console.say(f"{self.program.name} {describe(status)} after {lived_s:.1f} s. Its last lines:")
        for line in list(self._tail)[-10:] or ["(none)"]:
            self._console.say(f"    {line}")
        self._console.say(f"{self.program.name} is started again in {delay_s:g} s")
        self._tail.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()

    def _last_line(self) -> str:
        lines = [line for line in self._tail if line]
        return lines[-1].removeprefix("kvferry: ") if lines else "ended with a configuration error and said nothing"


class Fleet:
    """Children in stages: started in order, stopped in the reverse order, each stage at once."""

    def __init__(self, console: Console, backoff: Backoff | None = None) -> None:
        self.failed = asyncio.Event()
        self.failure: BaseException | None = None  # the first child that cannot go on
        self._console = console
        self._backoff = backoff or Backoff()
        self._stages: list[list[Child]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, programs: Sequence[Program]) -> None:
        """Starts one more stage and returns at once."""
        stage = [Child(program, self._console, self._backoff) for program in programs]
        self._stages.append(stage)
        for child in stage:
            task = asyncio.create_task(child.run(), name=child.program.name)
            task.add_done_callback(self._child_ended)
            self._tasks.append(task)

    async def wait_ready(self) -> None:
        """Returns when every child is ready; never, when one cannot become so (see `failed`)."""
        while waiting := [child for child in self._children if not child.ready.is_set()]:
            await waiting[0].ready.wait()

    def not_ready(self) -> list[str]:
        return [child.program.name for child in self._children if not child.ready.is_set()]

    async def drain(self) -> None:
        """Stops stage by stage, the last one first. No process is left when it returns."""
        for stage in reversed(self._stages):
            await asyncio.gather(*(child.stop() for child in stage))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """Ends every child at once; a `drain` under way then returns soon."""
        for child in self._children:
            child.kill()

    @property
    def _children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    def _child_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None and self.failure is None:
            self.failure = exc
            self.failed.set()


def describe(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
