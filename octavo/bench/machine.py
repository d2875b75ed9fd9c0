"""The machine on which is measured: what it is, and how quiet it was."""

from __future__ import annotations

import importlib
import os
import platform
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_LOOPS = 7
"""Loops of a probe; their median is its time."""
_LOOP = range(500_000)
_LOOK = 0.3
"""Seconds over which the CPU is watched before a measurement."""
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "hypervisor")
"""What a CPU says of itself that decides how fast a model runs, or how much to believe a clock."""


@dataclass(frozen=True)
class Quiet:
    """How quiet the machine was just before a measurement."""

    load_average: float
    """Runnable processes, over the last minute; the measurement before is in it."""
    busy_cores: float
    """Cores that were busy while nothing was asked."""
    probe_ms: float
    """What a fixed loop on one core took; more than at other times means a slower or a shared core."""


def quiet(patience: float = 0.0) -> Quiet:
    """
    Args:
        patience: seconds to wait for less than half a core to be busy.
    """
    deadline = time.monotonic() + patience
    while (busy := _busy_cores(_LOOK)) > 0.5 and time.monotonic() < deadline:
        pass
    return Quiet(os.getloadavg()[0], busy, probe())


def _busy_cores(seconds: float) -> float:
    before = busy_seconds()
    begun = time.perf_counter()
    time.sleep(seconds)
    return (busy_seconds() - before) / (time.perf_counter() - begun)


def busy_seconds() -> float:
    """Seconds that all cores together have worked since the machine started."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def stolen_seconds() -> float:
    """Seconds that a hypervisor gave to others while this machine wanted to work."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def probe() -> float:
    """Milliseconds of a fixed loop on one core."""
    taken = []
    for _ in range(_LOOPS):
        begun = time.perf_counter()
        sum(number * number for number in _LOOP)
        taken.append(time.perf_counter() - begun)
    return 1000 * statistics.median(taken)


def machine() -> dict[str, Any]:
    """What this machine is, as a report shows it; what cannot be found out is None."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "usable_threads": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_limit": _cpu_limit(),
        "cpu_flags": [flag for flag in _TELLING_FLAGS if flag in _cpu_flags()],
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_available_bytes": psutil.virtual_memory().available,
        "os": _os_name(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpus": [gpu["name"] for gpu in Gpus().devices()],
    }


def _cpu_lines(key: str) -> Iterable[str]:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            yield value.strip()


def _cpu_name() -> str | None:
    return next(iter(_cpu_lines("model name")), None) or platform.processor() or None


def _cpu_flags() -> set[str]:
    return set(next(iter(_cpu_lines("flags")), "").split())


def _cpu_limit() -> float | None:
    """Cores that the control group of this process may use."""
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return None if quota == "max" or not period else int(quota) / int(period)


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


class Gpus:
    """Memory of NVIDIA GPUs as the driver tells it; nothing where there is no driver, or no pynvml."""

    def __init__(self) -> None:
        self._nvml: Any = None
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # no package, no driver, no permission: each is its own kind of exception
            return
        self._nvml = nvml

    def _all(self) -> list[Any]:
        if self._nvml is None:
            return []
        return [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]

    def devices(self) -> list[dict[str, Any]]:
        """Name, total and used bytes of each."""
        found = []
        for gpu in self._all():
            name = self._nvml.nvmlDeviceGetName(gpu)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(gpu)
            text = name.decode() if isinstance(name, bytes) else name
            found.append({"name": text, "total": int(memory.total), "used": int(memory.used)})
        return found

    def used_by(self, pids: Iterable[int]) -> int | None:
        """Bytes that processes have on all GPUs; None where they have none, or the driver does not tell whose they are:
        it knows the processes of a container by other numbers."""
        wanted = set(pids)
        running = (p for gpu in self._all() for p in self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu))
        return sum(p.usedGpuMemory or 0 for p in running if p.pid in wanted) or None

    def used(self) -> int | None:
        """Bytes that anybody has on all GPUs; None where there is no GPU."""
        return sum(gpu["used"] for gpu in self.devices()) or None
