"""How many threads this process may use."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple


class AllowedCpus(NamedTuple):
    """A thread count, and the sentence that says why it is that."""

    threads: int
    reason: str


def allowed_cpus(root: Path = Path("/")) -> AllowedCpus:
    """The smaller of the cores this process may be scheduled on and the whole CPUs of its cgroup quota; at least 1.

    More threads than that would wait for one another: a step is as slow as its slowest worker. Of the hyper-threads of
    a core one counts: products keep the units that they share busy, and the system runs threads on cores of their own
    while there are any. `root` is where /proc and /sys are looked up.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    count = cores(cpus, root)
    where = f"{count} {'core' if count == 1 else 'cores'}" if count < len(cpus) else _cpus(count)
    reason = f"the process may run on {where}" + (f" with {_cpus(len(cpus))}" if count < len(cpus) else "")
    quota = cgroup_cpus(root)
    if quota is None or quota >= count:
        return AllowedCpus(count, reason)
    return AllowedCpus(max(1, int(quota)), f"the cgroup quota is {quota:g} CPUs, and {reason}")


def cores(cpus: Set[int], root: Path) -> int:
    """How many cores `cpus` are on: their hyper-threads count once."""
    return len({_core(cpu, root) & cpus for cpu in cpus})


def _cpus(count: int) -> str:
    return f"{count} {'CPU' if count == 1 else 'CPUs'}"


def _core(cpu: int, root: Path) -> frozenset[int]:
    """The hyper-threads of the core that `cpu` is one of; `cpu` alone where the system does not say."""
    try:
        text = (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        return frozenset({cpu, *cpu_list(text)})
    except (OSError, ValueError):
        return frozenset({cpu})


def cpu_list(text: str) -> list[int]:
    """Of a list as the system writes it: "0-3,8", or nothing. Raises ValueError."""
    ends = [part.partition("-") for part in text.strip().split(",")] if text.strip() else []
    return [cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)]


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
