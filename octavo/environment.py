"""What a bug report needs to know of a machine: gathered fact by fact, and one that is missing costs no other."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import octavo
from octavo.config import EngineConfig, environment_threads, telling_variables

Fact = str | list[str] | dict[str, str]
PATIENCE = 5.0
"""Seconds that a program which is asked gets."""
INSTRUCTION_SETS = (
    *("sse4_2", "avx", "f16c", "fma", "bmi2", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni"),
    *("avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
"""Those that matter to matrix products, as /proc/cpuinfo calls them."""
OPTIONAL = ("torch", "transformers", "opentelemetry-sdk", "uvloop", "httptools", "hf-xet", "vllm")
"""Packages that change something where they are installed."""
_INDENT = 25


def collect(config: EngineConfig, root: Path = Path("/")) -> dict[str, dict[str, Fact]]:
    """Everything there is to tell, by section and name. A fact that cannot be had is the reason why.

    Args:
        config: says which device is looked at, with what.
        root: where /proc, /sys and /etc are.
    """
    gpus = _Gpus(root)  # asked first: the answer takes long
    sections: dict[str, dict[str, Callable[[], Fact]]] = {
        "octavo": {
            "version": lambda: octavo.__version__,
            "commit": _commit,
            "installed at": lambda: str(Path(octavo.__file__).parent),
        },
        "system": {
            "os": lambda: _os(root),
            "kernel": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
            "libc": lambda: " ".join(platform.libc_ver()).strip() or "not known",
            "python": lambda: f"{platform.python_implementation()} {platform.python_version()} at {sys.executable}",
        },
        "cpu": {
            "model": lambda: _cpu_info(root, "model name", "Hardware", "CPU part"),
            "instruction sets": lambda: _instruction_sets(root),
            "kernels": _kernels,
            "cores": lambda: f"{os.cpu_count()} in the machine",
            "cores to use": lambda: _cores_to_use(root),
            "NUMA nodes": lambda: _numa(config, root),
        },
        "memory": {
            "installed": lambda: _memory(root, "MemTotal"),
            "available": lambda: _available(root),
            "swap": lambda: f"{_memory(root, 'SwapTotal')}, {_memory(root, 'SwapFree')} free",
            "huge pages": lambda: _huge_pages(root),
        },
        "choices at start-up": {
            "device": lambda: _device(config),
            "activations": lambda: _activations(config),
        },
        "packages": {"needed": _needed, "others": lambda: _versions(OPTIONAL)},
        "environment": {"variables": lambda: telling_variables() or "none that matter"},
        "gpu": {"gpus": gpus.tell},
    }
    return {title: {name: _told(tell) for name, tell in facts.items()} for title, facts in sections.items()}


def _told(tell: Callable[[], Fact]) -> Fact:
    try:
        return tell()
    except Exception as error:  # whatever is broken here is what the report is for
        return f"cannot be told: {type(error).__name__}: {error}"


def as_text(sections: Mapping[str, Mapping[str, Fact]]) -> str:
    """A block of lines for each section."""
    lines: list[str] = []
    for title, facts in sections.items():
        lines += [*([""] if lines else []), title]
        for name, fact in facts.items():
            told = [f"{key} {value}" for key, value in fact.items()] if isinstance(fact, dict) else fact
            rows = [told] if isinstance(told, str) else told or ["none"]
            for label, row in zip((name, *[""] * (len(rows) - 1)), rows, strict=True):
                lines += textwrap.wrap(
                    " ".join(row.split()),
                    120,
                    initial_indent=f"  {label:{_INDENT - 3}} ",
                    subsequent_indent=" " * _INDENT,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
    return "\n".join(lines)


def as_json(sections: Mapping[str, Mapping[str, Fact]]) -> str:
    return json.dumps(sections, indent=2)


# -- the facts


def _commit() -> str:
    """Of a source checkout."""
    root = Path(octavo.__file__).parents[1]
    if not (root / ".git").exists():
        return "none: this is no source checkout"
    commit = _git(root, "rev-parse", "HEAD")
    if commit.returncode:
        return f"git says: {' '.join(commit.stderr.split())}"
    changed = _git(root, "diff", "--quiet", "HEAD", "--", "octavo", "native").returncode
    return f"{commit.stdout.strip()}{' with changes of its own' if changed else ''}"


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE)


def _os(root: Path) -> str:
    text = (root / "etc/os-release").read_text()
    found = re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.MULTILINE)
    return found[1] if found else "not known"


def _cpu_info(root: Path, *names: str) -> str:
    """The first of these fields that /proc/cpuinfo has."""
    text = (root / "proc/cpuinfo").read_text()
    for name in names:
        if found := re.search(rf"^{name}\s*:\s*(.*)$", text, re.MULTILINE):
            return found[1].strip()
    raise LookupError(f"/proc/cpuinfo has no field {' or '.join(names)}")


def _instruction_sets(root: Path) -> str:
    flags = set(_cpu_info(root, "flags", "Features").split())
    return " ".join(name for name in INSTRUCTION_SETS if name in flags) or "none of those that matter"


def _kernels() -> str:
    """The tier of native kernels that would be used."""
    from octavo.devices import DeviceUnavailable
    from octavo.devices.cpu.native import load_native

    try:
        native = load_native()
    except DeviceUnavailable as error:
        return str(error)
    return f"{native.kernels()}, from {native.__file__}"


def _cores_to_use(root: Path) -> str:
    from octavo.devices.cpu.threads import allowed_cpus

    allowed = allowed_cpus(root)
    return f"{allowed.threads}: {allowed.reason}"


def _numa(config: EngineConfig, root: Path) -> Fact:
    """The CPUs of each node, and how many compute threads would work there."""
    from octavo.devices.cpu.nodes import share_threads
    from octavo.devices.cpu.threads import allowed_cpus

    asked = environment_threads() if config.threads is None else config.threads
    shares = {node.number: node.threads for node in share_threads(asked or allowed_cpus(root).threads, root)}
    told = []
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        number, cpus = int(folder.name[4:]), (folder / "cpulist").read_text().strip() or "none"
        count = shares.get(number)
        threads = "" if count is None else f", {count} thread" if count == 1 else f", {count} threads"
        told.append(f"{number}: CPUs {cpus}{threads}")
    return told or "not known"


def _memory(root: Path, name: str) -> str:
    found = re.search(rf"^{name}:\s*(\d+) kB$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    if found is None:
        raise LookupError(f"/proc/meminfo has no {name}")
    return _gib(int(found[1]) * 1024)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _available(root: Path) -> str:
    from octavo.devices.memory import available_memory

    size, source = available_memory(root / "proc", root / "sys/fs/cgroup")
    return f"{_gib(size)} {source}"


def _huge_pages(root: Path) -> str:
    chosen = re.search(r"\[(\w+)\]", (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text())
    reserved = re.search(r"^HugePages_Total:\s*(\d+)$", (root / "proc/meminfo").read_text(), re.MULTILINE)
    return f"transparent: {chosen[1] if chosen else 'not known'}; reserved: {reserved[1] if reserved else 'not known'}"


def _device(config: EngineConfig) -> Fact:
    """What start-up would say of the device."""
    from octavo.devices import select_device

    threads = environment_threads() if config.threads is None else config.threads
    device = select_device(config.device, threads, "float32")
    return [device.name, *device.notes]


def _activations(config: EngineConfig) -> Fact:
    """What start-up would say of activations, by what the weights are."""
    from octavo.resolve import activations

    kinds = {"2 to 6 bits": "Q4_K", "8 bits": "Q8_0", "bfloat16": "BF16", "other floats": "F32"}
    told = {name: activations(config, frozenset({kind}))[1] for name, kind in kinds.items()}
    return list(dict.fromkeys(told.values()))


def _needed() -> Fact:
    requirements = importlib.metadata.requires("octavo") or []
    return _versions(re.split(r"[^\w.-]", text, maxsplit=1)[0] for text in requirements if "extra ==" not in text)


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


class _Gpus:
    """What nvidia-smi says; it runs from the moment this is made."""

    def __init__(self, root: Path) -> None:
        program = shutil.which("nvidia-smi")
        self._driver = (root / "proc/driver/nvidia/version").exists()
        self._running: subprocess.Popen[str] | None = None
        self._problem = "no nvidia-smi"
        if program is None:
            return
        try:
            self._running = subprocess.Popen(
                [program, "--query-gpu=name,memory.total,compute_cap,driver_version", "--format=csv,noheader"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._problem = f"{program} cannot be run: {error.strerror}"

    def tell(self) -> Fact:
        if self._running is None:
            return f"{'an NVIDIA driver is there, but cannot be asked' if self._driver else 'none'} ({self._problem})"
        with self._running as running:
            try:
                said, _ = running.communicate(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                running.kill()
                return f"nvidia-smi has not answered within {PATIENCE:g} s"
        rows = [row.strip() for row in said.splitlines() if row.strip()]
        return rows if running.returncode == 0 else f"nvidia-smi failed: {' '.join(rows)}"
