"""How much memory this process may still take: the machine's and its control group's word, whichever is less."""

from __future__ import annotations

from pathlib import Path

_NO_LIMIT = 1 << 60


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """(bytes, where the number comes from). Page cache counts as free, in a control group too."""
    machine = _machine(proc)
    group = _group(cgroup)
    if group is not None and group < machine:
        return max(group, 0), "the control group's limit"
    return machine, "free on this machine"


def _machine(proc: Path) -> int:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 4 << 30  # no /proc: a number that fits any machine worth serving from


def _group(cgroup: Path) -> int | None:
    """Bytes left under the memory limit of this control group (version 2, then 1), or None."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            text = (cgroup / limit).read_text().strip()
            if text == "max" or int(text) >= _NO_LIMIT:
                continue
            left = int(text) - int((cgroup / used).read_text())
            for line in (cgroup / stat).read_text().splitlines():
                name, _, value = line.partition(" ")
                if name in ("inactive_file", "total_inactive_file"):
                    return left + int(value)
            return left
        except (OSError, ValueError):
            continue
    return None
