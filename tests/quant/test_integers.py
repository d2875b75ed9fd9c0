"""--quantization int8 and int4 of checkpoints in floats."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.build import build
from octavo.config import EngineConfig
from octavo.ops.contract import F32, Stored
from octavo.quant import dense, integers
from octavo.quant.method import QuantError
from octavo.quant.onload import RULES, quantize
from tests import realmodels
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.tiny import Loaded
from tests.quant.twins import plain

EIGHT, FOUR = RULES["int8"], RULES["int4"]


def stored(values: F32) -> Stored:
    return Stored("F32", *values.shape, np.ascontiguousarray(values, np.float32).view(np.uint8))


def test_by_hand() -> None:
    values = np.zeros((2, 32), np.float32)
    values[0, :4] = 127, -63.5, 1.4, -0.6
    values[1] = 0.25  # a block without extent is its minimum
    values[1, 7] = 15.25
    want = np.array([127, -64, 1, -1], np.float32)  # halves go to the even number
    np.testing.assert_array_equal(dense(quantize(EIGHT, stored(values)))[0, :4], want)
    got = dense(quantize(FOUR, stored(values)))
    np.testing.assert_array_equal(got[1], values[1])
    np.testing.assert_array_equal(dense(quantize(FOUR, stored(np.full((1, 32), 0.75)))), np.full((1, 32), 0.75))


@pytest.mark.parametrize("spread", [1e-6, 1e-3, 1.0, 1e4])
def test_nothing_is_further_than_half_a_step(spread: float) -> None:
    """Half a step, and what float16 scales round away: 2^-11 of the largest value, and half their smallest number."""
    values = (np.random.default_rng(0).normal(size=(64, 160)) * spread + spread).astype(np.float32)
    blocks = values.reshape(64, 5, 32)
    largest = np.abs(blocks).max(2, keepdims=True)
    extent = blocks.max(2, keepdims=True) - blocks.min(2, keepdims=True)
    for rule, step, steps in ((EIGHT, largest / 127, 127), (FOUR, extent / 15, 15)):
        error = np.abs(dense(quantize(rule, stored(values))).reshape(blocks.shape) - blocks)
        assert (error <= step / 2 + largest * 2**-10 + (steps + 1) * 2**-25).all()
        assert error.max() > step.max() / 8


def test_integers_on_a_grid_stay_as_they_are() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-127, 128, (8, 64)).astype(np.float32) / 4
    values[:, ::32] = 127 / 4
    np.testing.assert_array_equal(dense(quantize(EIGHT, stored(values))), values)
    values = rng.integers(0, 16, (8, 64)).astype(np.float32) / 8 - 1
    values[:, ::32], values[:, 1::32] = -1, 15 / 8 - 1
    np.testing.assert_array_equal(dense(quantize(FOUR, stored(values))), values)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_what_no_scale_can_hold_is_refused(bad: float) -> None:
    values = np.ones((2, 32), np.float32)
    values[1, 3] = bad
    for rows in (integers.eight_bits, integers.four_bits):
        with pytest.raises(QuantError, match="not finite, or too large for float16 scales"):
            rows(values)


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_model_is_that_of_its_rounded_matrices(device: str, name: str, tmp_path: Path) -> None:
    """Against the same model with the values of every quantized matrix in float32."""
    rule = RULES[name]
    path, ids = plain(tmp_path / "model", "Qwen2"), prompt(3, 40)

    def widened(rule: Any, matrix: Stored) -> Stored:
        return stored(dense(quantize(rule, matrix)))

    got, want = (
        Loaded(
            path, make_device(device), quantize=partial(how, rule), quantize_tables=partial(how, rule.tables)
        ).logits(ids)
        for how in (quantize, widened)
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("name", "says", "activations"),
    [
        ("int8", "integers of 8 bits", "int16"),
        ("int4", "integers of 4 bits", "int8"),
        ("bitsandbytes", "NF4", "float32"),
    ],
)
def test_start_up_says_what_was_done(name: str, says: str, activations: str, tmp_path: Path) -> None:
    built = build(EngineConfig(model=str(plain(tmp_path / "model")), quantization=name, max_num_seqs=2))
    text = "\n".join(built.info.notes)
    assert f"matrices quantized while loading: {says}" in text and f"activations {activations}" in text
    assert built.info.quantization == name
    built.engine.close()


LOAD = """
import sys, threading
from pathlib import Path
from tests.models.tiny import Loaded
from functools import partial
from octavo.devices.cpu.device import CpuDevice
from octavo.quant.onload import RULES, quantize

def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) * 1024

def watch():
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())

most, done = 0, threading.Event()
device, rule = CpuDevice(1, "float32"), RULES[sys.argv[2]]
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
quantizers = {"quantize": partial(quantize, rule), "quantize_tables": partial(quantize, rule.tables)}
model = Loaded(Path(sys.argv[1]), device, **quantizers, blocks=1, tokens=16, sequences=1)
done.set()
thread.join()
print(most - before, device.weight_bytes)
"""


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_memory_while_loading_is_the_packed_model_and_a_tensor(name: str) -> None:
    """Of a float32 model of 538 MB: its mapped pages do not count, they are the page cache's."""
    folder = realmodels.smollm2_hf()
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), name], capture_output=True, text=True, timeout=300, check=True
    )
    most, packed = map(int, run.stdout.split())
    tensor = 49152 * 576 * 4
    assert packed < 538e6 * {"int8": 0.28, "int4": 0.22}[name]
    assert most <= packed + tensor + 150e6
