"""Checkpoints as transformers saves them with HQQ; see also test_samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.build import build
from octavo.checkpoint import CheckpointError
from octavo.config import EngineConfig
from octavo.ops.contract import Stored
from octavo.quant import dense
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.test_split import split_logits
from tests.models.tiny import Loaded
from tests.quant.twins import Parts, plain, the_matrix, twins

SAID = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}
PACKING = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 8: "8bit_u8"}


def settings(shape: tuple[int, ...], bits: int, group: int, axis: int) -> Parts:
    return {
        ".nbits": torch.tensor(bits, dtype=torch.int32),
        ".group_size": torch.tensor(group, dtype=torch.int32),
        ".axis": torch.tensor(axis, dtype=torch.int32),
        ".shape": torch.tensor(shape),
        ".packing": torch.tensor(list(PACKING[bits].encode()), dtype=torch.uint8),
        ".view_as_float": torch.tensor(0, dtype=torch.uint8),
        ".quant_scale": torch.tensor(0, dtype=torch.uint8),
        ".quant_zero": torch.tensor(0, dtype=torch.uint8),
    }


def hqq(weight: torch.Tensor, bits: int = 4, group: int = 64, axis: int = 1) -> tuple[Parts, torch.Tensor]:
    """Nearest integers between the extremes of each group; the zero point is a fraction."""
    lines = weight.reshape((-1, group) if axis == 1 else (group, -1))
    low, high = lines.amin(axis, keepdim=True), lines.amax(axis, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale.float()).half()
    codes = (lines / scale.float() + zero.float()).round().clamp(0, 2**bits - 1)
    count = 10 if bits == 3 else 8 // bits
    whole = torch.zeros(-(-len(codes) // count) * count, codes.shape[1], dtype=torch.int64)
    whole[: len(codes)] = codes.long()
    packed = sum(part << bits * (count - 1 - i) for i, part in enumerate(whole.chunk(count)))
    parts = {".W_q": packed.to(torch.int32 if bits == 3 else torch.uint8), ".scale": scale, ".zero": zero}
    values = ((codes - zero.float()) * scale.float()).reshape(weight.shape)
    return parts | settings(tuple(weight.shape), bits, group, axis), values


def read(folder: Path, parts: Parts) -> Stored:
    save_file({f"m{ending}": part for ending, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": SAID}))
    return the_matrix(folder)


def test_by_hand(tmp_path: Path) -> None:
    """4 groups of 32: a byte has an integer of group 0 or 1 in its high half, and one of group 2 or 3 below."""
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[0, 5], packed[1, 31] = 0xA3, 0x0F
    scale, zero = torch.tensor([1.0, 2, 4, 8])[:, None], torch.tensor([0.5, 0, 1, 2])[:, None]
    parts = {".W_q": packed, ".scale": scale.half(), ".zero": zero.half()} | settings((2, 64), 4, 32, 1)
    stored = read(tmp_path, parts)
    assert stored.kind == "INT4_32"
    want = np.repeat(np.array([-0.5, 0, -4, -16], np.float32), 32).reshape(2, 64)
    want[0, 5], want[1, 5], want[1, 63] = 9.5, 2 * 4, 13 * 8
    np.testing.assert_array_equal(dense(stored), want)


@pytest.mark.parametrize("group", [64, 16])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", [8, 4, 3, 2, 1])
def test_every_width(bits: int, axis: int, group: int, tmp_path: Path) -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(bits))
    parts, values = hqq(weight, bits, group, axis)
    stored = read(tmp_path, parts)
    blocks = axis == 1 and group == 64
    assert stored.kind == ("F32" if not blocks else "INT8_32" if bits == 8 else "INT4_32")
    # 8 bits are stored less 128, for which scale * (128 - zero) is rounded: half a unit in the last place.
    np.testing.assert_allclose(dense(stored), values.numpy(), rtol=0, atol=0 if bits < 8 else 2e-7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({".scale": None}, ".scale is not there; F32/F16/BF16 with 4 values"),
        ({".zero": torch.ones(3)}, r".zero is F32 \[3\]; F32/F16/BF16 with 4 values"),
        ({".W_q": torch.zeros(2, 32, dtype=torch.uint8)}, "W_q has 64 bytes; 128 are needed for 4bit_u8"),
        ({".packing": None}, ".packing is 'not there'; 8bit_u8, 4bit_u8"),
        ({".packing": torch.tensor([53], dtype=torch.uint8)}, ".packing is '5'"),
        ({".shape": torch.tensor([4, 8, 8])}, r".shape is \[4, 8, 8\]"),
        ({".axis": torch.tensor(2)}, "axis 2"),
        ({".group_size": torch.tensor(100)}, "group_size 100"),
        ({".nbits": None}, ".nbits has 0 numbers"),
        ({".quant_zero": torch.tensor(1, dtype=torch.uint8)}, "quant_zero is 1: .* not supported"),
    ],
)
def test_quant_09_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    parts, _ = hqq(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(CheckpointError, match=f"'m' cannot be read as hqq: .*{message}"):
        read(tmp_path, {ending: part for ending, part in {**parts, **change}.items() if part is not None})


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize(
    ("family", "bits", "axis", "changes"),
    [
        ("Llama", 4, 1, {}),
        ("Qwen2", 2, 0, {}),
        ("Qwen2", 8, 1, {"hidden_size": 64, "intermediate_size": 96}),
        ("Qwen3Moe", 3, 1, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    ],
)
def test_logits_are_those_of_the_values(
    device: str, family: str, bits: int, axis: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    original = plain(tmp_path / "original", family, **changes)
    published, values = twins(original, tmp_path, lambda weight: hqq(weight, bits, axis=axis), SAID)
    got, want = (Loaded(path, make_device(device)).logits(prompt(3, 40), [17]) for path in (published, values))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_integer_activations_come_close(tmp_path: Path) -> None:
    """Of 8 bits: the rounding of 32 activations to 127 steps is 0.5 % of a product, and adds up over 14 of them. Of 16
    bits: 256 times less."""
    published, values = twins(plain(tmp_path / "original", "Qwen2"), tmp_path, hqq, SAID)
    want = Loaded(values, make_device("cpu")).logits(prompt(3, 40))
    errors = {}
    for activations in ("int8", "int16"):
        got = Loaded(published, make_device("cpu", activations=activations)).logits(prompt(3, 40))
        errors[activations] = float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))
    assert 0 < errors["int8"] < 0.05
    assert 0 < errors["int16"] < 0.05 / 256


def test_two_ranks_are_the_whole(tmp_path: Path) -> None:
    published, values = twins(plain(tmp_path / "original"), tmp_path, hqq, SAID)
    want = Loaded(values, make_device("reference")).logits(prompt(3, 40))
    for got in split_logits(published, prompt(3, 40), 2)[0]:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_start_up_says_what_it_is(tmp_path: Path) -> None:
    published, _ = twins(plain(tmp_path / "original"), tmp_path, hqq, SAID)
    built = build(EngineConfig(model=str(published), quantization="hqq", max_num_seqs=2))
    text = "\n".join(built.info.notes)
    assert "F32/INT4_32 weights" in text and "activations int8" in text
    built.engine.close()
