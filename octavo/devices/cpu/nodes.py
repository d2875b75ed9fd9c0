"""Which NUMA node each thread works on: CPUs reach the memory of their own node faster than that of others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from octavo.devices.cpu.threads import cores, cpu_list


class Node(NamedTuple):
    """A node of the system."""

    number: int
    cpus: tuple[int, ...]
    """Those that this process may run on; none where the affinity mask excludes the node."""
    threads: int
    """Of the compute threads."""


def share_threads(threads: int, root: Path = Path("/")) -> list[Node]:
    """The system's nodes, each with a share of `threads` in proportion to the cores that the process may use there.

    All take part, for each has memory bandwidth of its own. Empty where the system does not say which CPU is on which
    node. `root` is where /sys is looked up.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    known: dict[int, set[int]] = {}
    try:
        for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
            listed = cpu_list((folder / "cpulist").read_text())
            known[int(folder.name.removeprefix("node"))] = set(listed) & allowed
    except (OSError, ValueError):
        return []
    if set().union(*known.values()) != allowed:
        return []
    sizes = {number: cores(known[number], root) for number in sorted(known)}
    total, before, nodes = sum(sizes.values()), 0, []
    for number, size in sizes.items():
        # Rounded where the shares meet, so that they add up.
        first, end = ((2 * threads * n + total) // (2 * total) for n in (before, before + size))
        nodes.append(Node(number, tuple(sorted(known[number])), end - first))
        before += size
    return nodes
