"""Real Redis servers for tests, each on a socket of its own, and a proxy that answers late."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import redis

from kvferry.services.local.redis_server import find_redis_server, redis_command, redis_url, socket_path


def binaries() -> dict[str, Path]:
    """Every redis-server at hand: the one that `kvferry up` starts, and the system's where it is another."""
    found = {"bundled": find_redis_server()}
    ours = Path(sys.executable).parent  # first on the path where the environment is activated
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != ours)
    if system := shutil.which("redis-server", path=path):
        found["system"] = Path(system)
    return found


class RedisServer:
    def __init__(self, binary: Path, folder: Path) -> None:
        self.url = redis_url(folder)
        self.socket = str(socket_path(folder))
        self._command = redis_command(binary, folder)
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        self.admin = redis.Redis(unix_socket_path=self.socket)
        deadline = time.monotonic() + 20
        while True:
            try:
                self.admin.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    @contextlib.contextmanager
    def frozen(self):
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.admin.close()
        self._process.kill()
        self._process.wait()


@contextlib.asynccontextmanager
async def late_proxy(socket: str, delay_s: Callable[[], float]) -> AsyncIterator[str]:
    """A TCP address that passes everything on to a unix socket and brings each answer `delay_s()` late."""
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: Callable[[], float]) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await asyncio.sleep(delay_s())
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            up_reader, up_writer = await asyncio.open_unix_connection(socket)
            writers.append(up_writer)
            await asyncio.gather(copy(reader, up_writer, lambda: 0.0), copy(up_reader, writer, delay_s))
        except OSError:
            pass  # nobody listens behind it: its callers' connections end
        finally:
            for each in writers:
                each.close()
                with contextlib.suppress(OSError):
                    await each.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
