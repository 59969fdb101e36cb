"""The pool's memory: shared, private, too large for its folder, attached by strangers, left behind by the dead."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvferry.common.errors import ConfigError, TransferFailed
from kvferry.services.transfer.segment import PoolSegment

_FREE = 2**20
"""Size of the small tmpfs."""


@pytest.fixture
def small_dir(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_FREE}", "tmpfs", tmp_path], check=False)
    if mounted.returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def attach(segment: PoolSegment, **other: object) -> PoolSegment:
    announced: dict[str, object] = {
        "nonce": segment.nonce,
        "instance_id": "owner",
        "num_blocks": segment.num_blocks,
        "block_bytes": segment.block_bytes,
        **other,
    }
    path = str(announced.pop("path", segment.path))
    return PoolSegment.attach(path, **announced)  # type: ignore[arg-type]


def test_a_reader_sees_the_owners_bytes_and_cannot_write_them(tmp_path: Path) -> None:
    segment = PoolSegment.create(str(tmp_path), "owner", 5, 63)
    view = attach(segment)
    segment.buffer[4] = 7
    assert (view.buffer[4] == 7).all()
    assert not view.buffer[:4].any()
    with pytest.raises(ValueError, match="read-only"):
        view.buffer[0] = 1
    view.close()
    segment.close()


def test_the_file_is_named_after_its_owner_and_has_a_header_before_aligned_blocks(tmp_path: Path) -> None:
    segment = PoolSegment.create(str(tmp_path), "owner", 5, 63)
    path = Path(segment.path or "")
    assert path == tmp_path / f"kvferry-{os.getpid()}-owner.pool"
    assert path.stat().st_size == segment.size_bytes == segment.blocks_offset + 5 * 63
    assert path.stat().st_mode & 0o777 == 0o600
    assert segment.blocks_offset % 4096 == 0
    assert path.read_bytes()[:7] == b"kvferry"
    segment.close()


def test_close_removes_the_file_and_leaves_the_memory_to_its_users(tmp_path: Path) -> None:
    segment = PoolSegment.create(str(tmp_path), "owner", 5, 64)
    view = attach(segment)
    segment.close()
    segment.close()
    assert list(tmp_path.iterdir()) == []
    segment.buffer[1] = 9
    assert (view.buffer[1] == 9).all()


def test_a_private_pool_has_no_path() -> None:
    segment = PoolSegment.anonymous(3, 65)
    segment.buffer[:] = 1
    assert segment.buffer.shape == (3, 65)
    assert segment.path is None
    segment.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"nonce": bytes(16)}, "not the same host"),
        ({"instance_id": "somebody"}, "not the same host"),
        ({"num_blocks": 6}, "5 x 64 B, announced 6 x 64 B"),
        ({"block_bytes": 32}, "5 x 64 B, announced 5 x 32 B"),
        ({"path": "/dev/shm/kvferry-1-owner.pool"}, "No such file"),
        ({"path": "/etc/passwd"}, "not the name of a pool file"),
    ],
)
def test_a_segment_that_is_not_the_announced_one_is_refused(
    tmp_path: Path, other: dict[str, object], message: str
) -> None:
    segment = PoolSegment.create(str(tmp_path), "owner", 5, 64)
    with pytest.raises(TransferFailed, match=message):
        attach(segment, **other)
    segment.close()


def test_a_file_that_could_fault_or_hang_the_reader_is_refused(tmp_path: Path) -> None:
    segment = PoolSegment.create(str(tmp_path), "owner", 5, 4096)
    path = Path(segment.path or "")
    link, pipe, folder, other = (tmp_path / f"kvferry-{name}.pool" for name in ("link", "pipe", "folder", "other"))
    link.symlink_to(path)
    os.mkfifo(pipe)
    folder.mkdir()
    other.write_bytes(b"x" * 10_000)
    for wrong in (link, pipe, folder, other):
        with pytest.raises(TransferFailed, match=str(wrong)):
            attach(segment, path=wrong)
    os.truncate(path, segment.size_bytes - 1)
    with pytest.raises(TransferFailed, match="shorter than"):
        attach(segment)
    segment.close()


def test_too_little_space_is_an_error_with_both_numbers_and_leaves_nothing(small_dir: Path) -> None:
    with pytest.raises(ConfigError, match=rf"too small.* {4096 + 300 * 4096} bytes .*needed, {_FREE} free.*--shm-size"):
        PoolSegment.create(str(small_dir), "owner", 300, 4096)
    assert list(small_dir.iterdir()) == []
    PoolSegment.create(str(small_dir), "owner", 200, 4096).close()


def test_space_that_goes_between_the_look_and_the_reservation_is_the_same_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="too small for a shared pool"):
        PoolSegment.create(str(tmp_path), "owner", 5, 64)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="/nowhere: No such file"):
        PoolSegment.create("/nowhere", "owner", 5, 64)
    assert PoolSegment.sweep("/nowhere") == []


def test_of_nodes_that_race_for_the_space_as_many_win_as_fit(small_dir: Path) -> None:
    made: list[PoolSegment] = []
    refused: list[ConfigError] = []
    start = threading.Barrier(6)

    def create(i: int) -> None:
        start.wait()
        try:
            made.append(PoolSegment.create(str(small_dir), f"owner{i}", 110, 4096))
        except ConfigError as exc:
            refused.append(exc)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(refused)) == (2, 4)
    with contextlib.suppress(OSError):  # take what is left, so that a page not reserved would fault
        (small_dir / "rest").write_bytes(bytes(_FREE))
    for segment in made:
        segment.buffer[:] = 1
        segment.close()


def test_reservations_follow_one_another_so_that_none_takes_what_another_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, most = [0], [0]

    def reserve(fd: int, offset: int, size: int) -> None:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.02)
        os.ftruncate(fd, offset + size)
        inside[0] -= 1

    monkeypatch.setattr(os, "posix_fallocate", reserve)
    create = partial(PoolSegment.create, str(tmp_path), num_blocks=5, block_bytes=64)
    with ThreadPoolExecutor(4) as pool:
        for segment in pool.map(lambda i: create(instance_id=f"owner{i}"), range(4)):
            segment.close()
    assert most == [1]


_LEAVE_BEHIND = """
import os, sys
from kvferry.services.transfer.segment import PoolSegment
segment = PoolSegment.create(sys.argv[1], "dead", 5, 64)
print(segment.path, flush=True)
os._exit(9)
"""


def test_the_sweep_takes_files_of_dead_owners_and_no_others(tmp_path: Path) -> None:
    alive = PoolSegment.create(str(tmp_path), "owner", 5, 64)
    foreign = [tmp_path / "psm_1234", tmp_path / "kvferry.pool.txt", tmp_path / "other.pool"]
    for path in foreign:
        path.touch()
    left = subprocess.run(
        [sys.executable, "-c", _LEAVE_BEHIND, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False
    )
    dead = Path(left.stdout.strip())
    half_made = tmp_path / "kvferry-1-half.pool"
    half_made.touch()
    assert dead.exists()
    view = attach(alive)
    assert PoolSegment.sweep(str(tmp_path)) == sorted(map(str, (dead, half_made)))
    assert PoolSegment.sweep(str(tmp_path)) == []
    assert Path(alive.path or "").exists()
    assert all(path.exists() for path in foreign)
    view.close()
    assert Path(alive.path or "").exists()
    alive.close()


def test_memory_of_a_dead_owner_stays_readable(tmp_path: Path) -> None:
    code = _LEAVE_BEHIND.replace("print(", "segment.buffer[:] = 3\nprint(segment.nonce.hex(), ")
    left = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False)
    nonce, path = left.stdout.split()
    view = PoolSegment.attach(path, nonce=bytes.fromhex(nonce), instance_id="dead", num_blocks=5, block_bytes=64)
    assert PoolSegment.sweep(str(tmp_path)) == [path]
    assert np.all(view.buffer == 3)


def test_prefaulting_changes_no_byte_and_enters_the_pages() -> None:
    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    segment = PoolSegment.anonymous(64, 3 * 4096 + 17)
    segment.buffer[7] = 9
    segment.prefault([5, 6, 7, 8, 40, 63])
    segment.prefault([6, 40])
    assert not segment.buffer[[0, 1, 5, 6, 8, 40, 63]].any()
    assert (segment.buffer[7] == 9).all()
    for expect_fewer, blocks in ((True, (5, 6, 8, 40, 63)), (False, (10, 20, 30, 50, 60))):
        before = faults()
        for block in blocks:
            segment.buffer[block] = 1
        assert (faults() - before < 5) is expect_fewer, (blocks, faults() - before)
