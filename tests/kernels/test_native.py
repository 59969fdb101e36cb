"""The cache of compiled kernels: filled once, mended when damaged, done without where it cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvferry.kernels.cpu import native


@pytest.fixture
def archive() -> bytes:
    """What the compiler gives, taken from the cache of this machine."""
    native.kernels()
    (path,) = (native.cache_dir() / "kernels").glob(f"{native._digest()}.zip")
    return path.read_bytes()


@pytest.fixture
def compiles(archive: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """An empty cache and a compiler that is quick; grows with each compilation."""
    calls: list[int] = []

    def compile_() -> bytes:
        calls.append(1)
        return archive

    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_compile", compile_)
    return calls


load = native.kernels.__wrapped__


def test_kernels_are_compiled_once_and_then_read(compiles: list[int], tmp_path: Path) -> None:
    load()
    load()
    assert len(compiles) == 1
    assert len(list((tmp_path / "cache/kernels").glob("*.zip"))) == 1


def test_one_compiles_while_the_others_wait(
    compiles: list[int], monkeypatch: pytest.MonkeyPatch, archive: bytes
) -> None:
    def slowly() -> bytes:
        compiles.append(1)
        time.sleep(0.3)
        return archive

    monkeypatch.setattr(native, "_compile", slowly)
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(load) for _ in range(3)]:
            done.result()
    assert len(compiles) == 1


@pytest.mark.parametrize("damage", [b"", b"no archive", None], ids=["empty", "other", "cut"])
def test_a_damaged_file_is_compiled_anew(damage: bytes | None, compiles: list[int], tmp_path: Path) -> None:
    load()
    (path,) = (tmp_path / "cache/kernels").glob("*.zip")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    load()
    assert len(compiles) == 2
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_done_without(
    compiles: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert load()._address
    assert "cannot be kept" in caplog.text


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    monkeypatch.setattr(native.sys, "executable", os.devnull)
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        load()


def test_other_sources_have_another_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = native._digest()
    (tmp_path / "kernel.py").write_text("")
    monkeypatch.setattr(native, "_SOURCES", tmp_path)
    assert native._digest() != before


def test_what_serves_does_not_import_the_compiler() -> None:
    program = "import sys, kvferry.kernels.ops; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
