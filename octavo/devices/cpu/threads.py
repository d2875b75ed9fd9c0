"""How many threads this process may use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class AllowedCpus(NamedTuple):
    """A thread count, and the sentence that says why it is that."""

    threads: int
    reason: str


def allowed_cpus(root: Path = Path("/")) -> AllowedCpus:
    """The smaller of the CPUs this process may be scheduled on and the whole CPUs of its cgroup quota; at least 1.

    More threads than that would wait for one another: a step is as slow as its slowest worker. `root` is where
    /proc and /sys are looked up.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpus(root)
    if quota is None or quota >= affinity:
        return AllowedCpus(affinity, f"the process may run on {affinity} {_cpus(affinity)}")
    threads = max(1, int(quota))
    return AllowedCpus(threads, f"the cgroup quota is {quota:g} CPUs, of {affinity} the process may run on")


def _cpus(count: int) -> str:
    return "CPU" if count == 1 else "CPUs"


def cgroup_cpus(root: Path) -> float | None:
    """CPUs' worth of time that the process's cgroup and its ancestors allow (v2 or v1); None without a limit."""
    limits = []
    for hierarchy, path in _cgroups(root):
        mount = root / "sys/fs/cgroup"
        if hierarchy:
            mount = next((m for m in (mount / hierarchy, mount / "cpu") if m.is_dir()), mount)
        # In a container the path may be the host's: what exists of it counts, and the mount itself.
        folder = mount / path.lstrip("/")
        for at in (folder, *folder.parents):
            limit = _limit(at)
            if limit is not None:
                limits.append(limit)
            if at == mount:
                break
    return min(limits, default=None)


def _cgroups(root: Path) -> list[tuple[str, str]]:
    """(v1 controllers or "", path) of the cgroups that can limit CPU time."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [(names, path) for _, names, path in entries if not names or "cpu" in names.split(",")]


def _limit(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        return int(quota) / int(period) if quota not in ("max", "-1") else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
