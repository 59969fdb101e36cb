from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.common import cores
from kvferry.common.cores import available_cores, available_memory_bytes


@pytest.fixture
def affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_a_quota_the_affinity_counts(tmp_path, affinity):
    assert available_cores(tmp_path, tmp_path / "none") == 8


@pytest.mark.parametrize(
    ("limit", "cores"), [("max 100000", 8), ("350000 100000", 3), ("50000 100000", 1), ("garbage", 8)]
)
def test_groups_v2(tmp_path, affinity, limit, cores):
    write(tmp_path / "self", "0::/system/box\n")
    write(tmp_path / "fs" / "system" / "box" / "cpu.max", limit)
    assert available_cores(tmp_path / "fs", tmp_path / "self") == cores


def test_the_tightest_limit_above_counts(tmp_path, affinity):
    write(tmp_path / "self", "0::/a/b\n")
    write(tmp_path / "fs" / "a" / "cpu.max", "200000 100000")
    write(tmp_path / "fs" / "a" / "b" / "cpu.max", "600000 100000")
    assert available_cores(tmp_path / "fs", tmp_path / "self") == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("400000", 4)])
def test_groups_v1(tmp_path, affinity, quota, cores):
    write(tmp_path / "self", "4:memory:/box\n3:cpu:/box\n")
    write(tmp_path / "fs" / "cpu" / "box" / "cpu.cfs_quota_us", quota)
    write(tmp_path / "fs" / "cpu" / "box" / "cpu.cfs_period_us", "100000")
    assert available_cores(tmp_path / "fs", tmp_path / "self") == cores


def test_a_container_sees_its_limit_at_the_mount(tmp_path, affinity):
    write(tmp_path / "self", "0::/docker/0123\n")
    write(tmp_path / "fs" / "cpu.max", "200000 100000")
    assert available_cores(tmp_path / "fs", tmp_path / "self") == 2


def test_this_machine_has_at_least_one():
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


def test_memory_is_what_the_tightest_group_has_left(tmp_path):
    write(tmp_path / "self", "0::/a/b\n")
    assert available_memory_bytes(tmp_path / "fs", tmp_path / "self") > 10_000
    write(tmp_path / "fs" / "a" / "memory.max", "10000")
    write(tmp_path / "fs" / "a" / "memory.current", "4000")
    write(tmp_path / "fs" / "a" / "b" / "memory.max", "max")
    write(tmp_path / "fs" / "a" / "b" / "memory.current", "3000")
    assert available_memory_bytes(tmp_path / "fs", tmp_path / "self") == 6000


def test_what_the_page_cache_would_give_back_counts_as_free(tmp_path, monkeypatch):
    write(tmp_path / "meminfo", "MemTotal: 32000 kB\nMemFree: 1000 kB\nMemAvailable: 20000 kB\n")
    monkeypatch.setattr(cores, "_MEMINFO", tmp_path / "meminfo")
    assert available_memory_bytes(tmp_path, tmp_path / "none") == 20000 * 1024


def test_memory_of_groups_v1(tmp_path):
    write(tmp_path / "self", "4:memory:/box\n3:cpu:/box\n")
    write(tmp_path / "fs" / "memory" / "box" / "memory.limit_in_bytes", "5000")
    write(tmp_path / "fs" / "memory" / "box" / "memory.usage_in_bytes", "6000")
    assert available_memory_bytes(tmp_path / "fs", tmp_path / "self") == 0
