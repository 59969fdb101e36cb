"""How many cores and how much memory this process may use: the machine's, or what its control group leaves of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

NODE_ENVIRON = {
    # Threads wait for the next piece of work for about 2 ms before they sleep: waking one costs more than most pieces,
    # and threads that spin for ever take the cores from other processes (docs/decisions.md has the figures).
    "GOMP_SPINCOUNT": "100000",
    # Freed memory is kept for the next step: a page fault costs more than the work on the page.
    "MALLOC_TOP_PAD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": str(256 * 2**20),
}
"""What a process that computes wants in its environment from its start on."""

_CGROUPS = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_cores(cgroups: Path = _CGROUPS, membership: Path = _SELF) -> int:
    """At least 1. A quota of 1.5 cores counts as 1: a thread more would be throttled with all the others."""
    try:
        affinity = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        affinity = os.cpu_count() or 1
    quota = _quota(cgroups, membership)
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def available_memory_bytes(cgroups: Path = _CGROUPS, membership: Path = _SELF) -> int:
    """What is free on this machine, or left of the control groups' limits, whichever is less."""
    free = _available_bytes() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = [_memory_left(folder, is_v1) for folder, is_v1 in _groups("memory", cgroups, membership)]
    return min((free, *(amount for amount in left if amount is not None)))


def _available_bytes() -> int | None:
    """What programs may take without swapping: with what the page cache would give back."""
    try:
        lines = (line.split() for line in _MEMINFO.read_text().splitlines())
        return next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _quota(cgroups: Path, membership: Path) -> float | None:
    """The tightest limit on the way from this process's group to the root, in cores."""
    groups = _groups("cpu", cgroups, membership)
    limits = [_limit_v1(folder) if is_v1 else _limit_v2(folder) for folder, is_v1 in groups]
    return min((limit for limit in limits if limit is not None), default=None)


def _groups(controller: str, cgroups: Path, membership: Path) -> Iterator[tuple[Path, bool]]:
    """This process's group and those above it, each with whether it is of version 1."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        mount = cgroups if not controllers else cgroups / controllers
        if controllers and controller not in controllers.split(","):
            continue
        group = mount / path.lstrip("/")
        # In a container the path may be the host's: then only the mount itself shows our group.
        for folder in (group, *group.parents):
            if folder != mount and mount not in folder.parents:
                break
            yield folder, bool(controllers)


def _memory_left(folder: Path, is_v1: bool) -> int | None:
    limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
    try:
        return max(0, int((folder / limit).read_text()) - int((folder / used).read_text()))
    except (OSError, ValueError):  # no file, or "max"
        return None


def _limit_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _limit_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
