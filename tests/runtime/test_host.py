"""What a step costs beside the native call: how often Python calls into native code, and what it allocates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from octavo.devices.cpu.device import CpuModel
from tests.models.tiny import make
from tests.runtime.decoding import BLOCKS, SEQUENCES, decoding

ROOT = Path(__file__).parents[2]
BYTES_EACH = 32
"""What a line may allocate for each sequence of a step: a few numbers or pointers."""
BYTES_EACH_BLOCK = 48
"""What a line of the block pool may allocate for each block that there is: its dictionaries are made anew when they
have become too small, a few times until all blocks are in them."""


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
    # What stays is what was drawn: a token of each sequence and step.
    assert sizes.pop("kept") < BYTES_EACH * SEQUENCES
    lines = {line: size for line, size in sizes.items() if "/octavo/" in line or "/numpy/" in line}
    assert len(lines) > 100, "the steps were not traced"
    pool = {line: lines.pop(line) for line in list(lines) if "/octavo/engine/blocks.py:" in line}
    assert max(pool.values()) <= BYTES_EACH_BLOCK * BLOCKS, pool
    assert {line: size for line, size in lines.items() if size > BYTES_EACH * SEQUENCES} == {}
