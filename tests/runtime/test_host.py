"""What a step costs beside the native call: how often Python calls into native code, and what it allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from linecache import getline
from pathlib import Path
from typing import Any

import pytest

from octavo.devices.cpu.device import CpuModel
from tests.models.tiny import make
from tests.runtime.decoding import SEQUENCES, decoding

ROOT = Path(__file__).parents[2]
LINE = 1024
"""Bytes that a line of a step may take at once."""
CALL = "self.model.run(batch, sampling, drawn)"
"""The one line that may take three times as many: handles of about thirty arrays, for the time of the native call. None
of them is large, and their number does not depend on the step."""
KEPT_EACH = 32
"""Bytes that may stay of a step for each sequence: the token that was drawn."""


class Counted:
    """`inner`, with its calls counted."""

    def __init__(self, inner: Any, calls: Counter[str]) -> None:
        self.inner = inner
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = make("llama", tmp_path_factory.mktemp("host"))
    return path


def test_native_calls_of_a_step(llama: Path) -> None:
    rig, calls = decoding(llama), Counter[str]()
    model = rig.engine.executor.runner.model
    assert isinstance(model, CpuModel)
    model.model = Counted(model.model, calls)
    model.device.native = Counted(model.device.native, calls)
    for _ in range(5):
        assert len(rig.engine.step()) == SEQUENCES
    assert calls == {"run": 5}
    rig.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_allocations_of_a_step(llama: Path, temperature: float) -> None:
    command = [sys.executable, "-m", "tests.runtime.decoding", str(llama), str(temperature)]
    sizes = json.loads(subprocess.check_output(command, cwd=ROOT, timeout=600))
    assert 3900 < sizes.pop("planted") < 4200
    assert sizes.pop("kept") <= KEPT_EACH * SEQUENCES
    lines = {line: size for line, size in sizes.items() if "/octavo/" in line or "/numpy/" in line}
    assert len(lines) > 100, "the steps were not traced"
    calls = [line for line in lines if getline(*_place(line)).strip() == CALL]
    assert [lines.pop(line) <= 3 * LINE for line in calls] == [True]
    assert {line: size for line, size in lines.items() if size > LINE} == {}


def _place(line: str) -> tuple[str, int]:
    file, _, number = line.rpartition(":")
    return file, int(number)
