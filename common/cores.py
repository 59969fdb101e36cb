"""How many cores this process may use: its affinity and its control group's quota, whichever is less."""

from __future__ import annotations

import os
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


def available_cores(cgroups: Path = _CGROUPS, membership: Path = _SELF) -> int:
    """At least 1. A quota of 1.5 cores counts as 1: a thread more would be throttled with all the others."""
    try:
        affinity = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        affinity = os.cpu_count() or 1
    quota = _quota(cgroups, membership)
    return max(1, affinity if quota is None else min(affinity, int(quota)))


def _quota(cgroups: Path, membership: Path) -> float | None:
    """The tightest limit on the way from this process's group to the root, in cores. Groups v2, then v1."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return None
    limits = []
    for _, controllers, path in lines:
        mount = cgroups if not controllers else cgroups / controllers
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = mount / path.lstrip("/")
        # In a container the path may be the host's: then only the mount itself shows our group.
        for folder in (group, *group.parents):
            if folder != mount and mount not in folder.parents:
                break
            limits.append(_limit_v1(folder) if controllers else _limit_v2(folder))
    return min((limit for limit in limits if limit is not None), default=None)


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
