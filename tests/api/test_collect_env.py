"""`octavo collect-env`: what it tells is true, nothing makes it fail, and it keeps secrets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import environment
from octavo.config import EngineConfig
from octavo.devices import select_device
from octavo.devices.cpu.native import load_native
from octavo.devices.cpu.threads import allowed_cpus
from octavo.environment import as_text, collect

ROOT = Path(__file__).parents[2]


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`octavo collect-env` with no other variables than these."""
    return subprocess.run(
        [sys.executable, "-m", "octavo", "collect-env", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def told(*arguments: str, **variables: str) -> dict[str, dict[str, Any]]:
    done = command("--json", *arguments, **variables)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def test_what_is_told_of_this_machine_is_true() -> None:
    found = told()
    assert found["octavo"]["version"] == octavo.__version__
    assert found["octavo"]["installed at"] == str(ROOT / "octavo")
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
        assert found["octavo"]["commit"].split()[0] == head.strip()
    assert found["system"]["kernel"] == f"{platform.system()} {platform.release()} {platform.machine()}"
    assert found["system"]["python"] == f"CPython {platform.python_version()} at {sys.executable}"
    assert found["cpu"]["cores"] == f"{os.cpu_count()} in the machine"
    assert found["cpu"]["cores to use"] == ": ".join(map(str, allowed_cpus()))
    cpuinfo = Path("/proc/cpuinfo").read_text()
    assert f": {found['cpu']['model']}\n" in cpuinfo
    assert "avx2" in found["cpu"]["instruction sets"].split() and "sse" not in found["cpu"]["instruction sets"].split()
    assert found["cpu"]["kernels"].startswith(f"{load_native().kernels()}, from ")
    assert "_native" in found["cpu"]["kernels"]
    total = int(Path("/proc/meminfo").read_text().split()[1]) / 2**20
    assert found["memory"]["installed"] == f"{total:.1f} GiB"
    assert found["packages"]["needed"]["msgspec"] == importlib.metadata.version("msgspec")
    assert "pytest" not in found["packages"]["needed"]


def test_it_says_what_start_up_would_say() -> None:
    device = select_device("cpu", 1, "float32")
    found = told("--threads", "1", "--cpu-activations", "int16")["choices at start-up"]
    assert found == {"device": ["cpu", *device.notes], "activations": ["activations int16 as asked"]}
    assert "because of --dtype float32" in told(OCTAVO_DTYPE="float32")["choices at start-up"]["activations"][0]
    assert told("--device", "reference")["choices at start-up"]["device"][0] == "reference"
    assert len(told()["choices at start-up"]["activations"]) == 4


def test_secrets_are_left_out() -> None:
    done = command(
        OCTAVO_API_KEY="quiet-1",
        OCTAVO_HF_TOKEN="quiet-2",
        HF_TOKEN="hf_quiet3quiet3",
        HUGGING_FACE_HUB_TOKEN="quiet-4",
        VLLM_API_KEY="quiet-5",
        HF_ENDPOINT="https://me:quiet-6@quiet-6@hub.example/x",
        OCTAVO_MODEL="sk-quiet7quiet7",
        HTTPS_PROXY="http://quiet-8@proxy:3128",
        OCTAVO_TOKENIZER="some/tokenizer",
        OMP_NUM_THREADS="2",
        UNRELATED="quiet-9",
        AWS_SECRET_ACCESS_KEY="quiet-10",
    )
    assert done.returncode == 0 and "quiet" not in done.stdout + done.stderr
    lines = [" ".join(text.split()) for text in done.stdout.splitlines()]
    for expected in (
        "OCTAVO_HF_TOKEN ***",
        "HF_ENDPOINT https://***@hub.example/x",
        "OCTAVO_MODEL ***",
        "OCTAVO_TOKENIZER some/tokenizer",
        "OMP_NUM_THREADS 2",
    ):
        assert any(text.endswith(expected) for text in lines), expected


def test_it_loads_no_torch_and_no_transformers() -> None:
    code = (
        "import sys; from octavo.api.cli import main; assert main(['collect-env']) == 0; "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_a_machine_that_tells_nothing_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = collect(EngineConfig(), tmp_path)
    for section, name in (
        ("system", "os"),
        ("cpu", "model"),
        ("cpu", "instruction sets"),
        ("memory", "installed"),
        ("memory", "huge pages"),
    ):
        fact = found[section][name]
        assert isinstance(fact, str) and fact.startswith("cannot be told: FileNotFoundError: "), (section, name)
    assert found["gpu"]["gpus"] == "none (no nvidia-smi)"
    assert found["octavo"]["version"] == octavo.__version__
    assert "cannot be told" in as_text(found)


def test_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 7})
    for name, text in {
        "etc/os-release": 'NAME="Debian"\nPRETTY_NAME="Debian 13"\n',
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast 9000\nflags\t\t: sse4_2 fpu amx_tile avx512_vnni\n",
        "proc/meminfo": "MemTotal:  4194304 kB\nMemAvailable: 2097152 kB\nSwapTotal: 1048576 kB\nSwapFree: 0 kB\n"
        "HugePages_Total:       8\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/node/node0/cpulist": "0-3\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
        "sys/fs/cgroup/memory.max": str(1 << 30),
        "sys/fs/cgroup/memory.current": str(1 << 29),
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/cpu.max": "100000 100000",
        "proc/self/cgroup": "0::/\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = collect(EngineConfig(), tmp_path)
    assert found["system"]["os"] == "Debian 13"
    assert found["cpu"]["model"] == "Fast 9000" and found["cpu"]["instruction sets"] == "sse4_2 avx512_vnni amx_tile"
    assert found["cpu"]["NUMA nodes"] == ["0: CPUs 0-3, 1 thread", "1: CPUs 4-7, 0 threads"]
    (tmp_path / "sys/devices/system/node/node1/cpulist").write_text("4-6\n")  # and CPU 7 is nowhere
    nodes = collect(EngineConfig(), tmp_path)["cpu"]["NUMA nodes"]
    assert nodes == ["0: CPUs 0-3", "1: CPUs 4-6"]
    assert str(found["cpu"]["cores to use"]).startswith("1: ")
    assert found["memory"] == {
        "installed": "4.0 GiB",
        "available": "0.5 GiB the control group's limit",
        "swap": "1.0 GiB, 0.0 GiB free",
        "huge pages": "transparent: never; reserved: 8",
    }


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "echo 'H200, 143771 MiB, 9.0, 580.1'; echo 'H200, 143771 MiB, 9.0, 580.1'",
            ["H200, 143771 MiB, 9.0, 580.1"] * 2,
        ),
        ("echo 'cannot talk to the driver'; exit 9", "nvidia-smi failed: cannot talk to the driver"),
        ("exec sleep 60", "nvidia-smi has not answered within 0.2 s"),
        (None, "none ({path} cannot be run: Exec format error)"),
    ],
)
def test_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, expected: Any) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\0" if script is None else f"#!/bin/sh\n{script}\n".encode())
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(environment, "PATIENCE", 0.2 if "sleep" in str(script) else 10.0)
    gpus = collect(EngineConfig())["gpu"]["gpus"]
    assert gpus == (expected.format(path=program) if isinstance(expected, str) else expected)


def test_wrong_settings_are_part_of_the_report(tmp_path: Path) -> None:
    found = told(OCTAVO_THREADS="many")
    assert found["choices at start-up"]["complaints"] == [
        "environment variable OCTAVO_THREADS must be a whole number, got 'many'."
    ]
    assert found["environment"]["variables"]["OCTAVO_THREADS"] == "many"
    assert "no option" in told(OCTAVO_THREADZ="1")["choices at start-up"]["complaints"][0]
    assert "cannot read the config file" in told("--config", "/nowhere")["choices at start-up"]["complaints"][0]


def test_what_a_terminal_cannot_show() -> None:
    done = command(HF_HOME="/für/\udcff", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "HF_HOME /f\\xfcr/\\udcff" in done.stdout
