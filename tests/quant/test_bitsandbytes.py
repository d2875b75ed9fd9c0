"""Checkpoints as transformers saves them with bitsandbytes; see also test_samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.build import build
from octavo.checkpoint import CheckpointError
from octavo.config import EngineConfig
from octavo.ops.contract import Stored
from octavo.quant import dense
from octavo.quant.codebook import FP4_32, NF4_32
from octavo.quant.onload import RULES, quantize
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.test_split import split_logits
from tests.models.tiny import Loaded
from tests.quant.twins import Parts, plain, the_matrix, twins

SAID = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TABLE = torch.tensor(NF4_32.values)


def state(shape: list[int], block: int = 64, **more: Any) -> torch.Tensor:
    said = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": shape, **more}
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def nf4(weight: torch.Tensor, block: int = 64) -> tuple[Parts, torch.Tensor]:
    """Nearest codes of the matrix as one long row."""
    flat = weight.reshape(-1)
    maxima = torch.stack([part.abs().max() for part in flat.split(block)])
    wide = maxima.repeat_interleave(block)[: len(flat)]
    codes = (flat[:, None] / wide[:, None] - TABLE).abs().argmin(1).to(torch.uint8)
    parts = {
        ".weight": (codes[::2] << 4 | torch.cat([codes[1::2], codes[:0].new_zeros(len(codes) % 2)]))[:, None],
        ".weight.absmax": maxima,
        ".weight.quant_map": TABLE.clone(),
        ".weight.quant_state.bitsandbytes__nf4": state(list(weight.shape), block),
    }
    return parts, (TABLE[codes.long()] * wide).reshape(weight.shape)


def int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    maxima = weight.abs().amax(1)
    codes = (weight / maxima[:, None] * 127).round().to(torch.int8)
    parts = {".weight": codes, ".SCB": maxima, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * (maxima / 127)[:, None]


def read(folder: Path, parts: Parts) -> Stored:
    folder.mkdir(exist_ok=True)
    save_file({f"m{ending}": part for ending, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": SAID}))
    return the_matrix(folder)


def test_by_hand(tmp_path: Path) -> None:
    """Of a byte the high half is first; a block of 64 ends in the middle of the second row."""
    packed = torch.zeros(48, 1, dtype=torch.uint8)
    packed[0], packed[24], packed[32] = 0xF0, 0x1E, 0x7F
    parts = {
        ".weight": packed,
        ".weight.absmax": torch.tensor([2.0, 0.5]),
        ".weight.quant_map": TABLE,
        ".weight.quant_state.bitsandbytes__nf4": state([3, 32]),
    }
    stored = read(tmp_path, parts)
    assert stored.kind == "NF4_32"
    want = np.full((3, 32), -2, np.float32)
    want[2] = -0.5
    want[0, 0] = 2
    want[1, 16], want[1, 17] = np.float32(NF4_32.values[1]) * 2, np.float32(NF4_32.values[14]) * 2
    want[2, 0], want[2, 1] = 0, 0.5
    np.testing.assert_array_equal(dense(stored), want)


def test_maxima_may_be_quantized_themselves(tmp_path: Path) -> None:
    parts = {
        ".weight": torch.full((64, 1), 0xFF, dtype=torch.uint8),
        ".weight.absmax": torch.tensor([0, 255], dtype=torch.uint8),
        ".weight.nested_absmax": torch.tensor([3.0]),
        ".weight.nested_quant_map": torch.linspace(-1, 1, 256),
        ".weight.quant_map": TABLE,
        ".weight.quant_state.bitsandbytes__nf4": state([4, 32], nested_blocksize=256, nested_offset=4.5),
    }
    stored = read(tmp_path, parts)
    np.testing.assert_array_equal(dense(stored), np.repeat(np.array([[1.5], [7.5]], np.float32), 2, 0) * np.ones(32))


@pytest.mark.parametrize(("shape", "kind"), [((5, 7), "F32"), ((3, 30), "F32"), ((3, 32), "NF4_32")])
def test_quant_06_the_last_block_may_be_cut(shape: tuple[int, int], kind: str, tmp_path: Path) -> None:
    parts, values = nf4(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    stored = read(tmp_path, parts)
    assert stored.kind == kind
    np.testing.assert_array_equal(dense(stored), values.numpy())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_codes_may_be_kept_as_another_type(kind: torch.dtype, tmp_path: Path) -> None:
    parts, values = nf4(torch.randn(6, 64, generator=torch.Generator().manual_seed(0)))
    parts[".weight"] = parts[".weight"].reshape(-1).view(kind)[:, None]
    np.testing.assert_array_equal(dense(read(tmp_path, parts)), values.numpy())


def test_values_of_codes_are_those_of_the_file(tmp_path: Path) -> None:
    parts, _ = nf4(torch.ones(1, 64))
    parts[".weight.quant_map"] = TABLE * 3
    stored = read(tmp_path, parts)
    assert stored.kind == "F32" and np.array_equal(dense(stored), np.full((1, 64), 3))
    parts[".weight.quant_state.bitsandbytes__fp4"] = parts.pop(".weight.quant_state.bitsandbytes__nf4")
    parts[".weight.quant_map"] = torch.tensor(FP4_32.values)
    stored = read(tmp_path, parts)
    assert stored.kind == "FP4_32" and np.array_equal(dense(stored), np.full((1, 64), -0.25))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({".weight": torch.zeros(63, 1, dtype=torch.uint8)}, "has 63 bytes; 128 codes of 4 bits are needed"),
        ({".weight": None}, "has 0 bytes"),
        ({".weight.absmax": None}, "it has no .weight.absmax"),
        ({".weight.absmax": torch.ones(3)}, r"absmax is F32 \[3\]; F32/F16/BF16 \[2\] is needed"),
        ({".weight.absmax": torch.ones(2, dtype=torch.uint8)}, r"absmax is U8 \[2\]; F32"),
        ({".weight.quant_map": torch.ones(8)}, r"quant_map is F32 \[8\]"),
        ({".SCB": torch.ones(2)}, "it has .weight.quant_state.bitsandbytes__nf4 and SCB"),
        ({".weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}, "does not say shape"),
        ({".weight.quant_state.bitsandbytes__nf4": state([2, 64], 0)}, "0 is no size"),
        ({".weight.quant_state.bitsandbytes__nf4": state([2, 64, 1])}, "does not say shape"),
        (
            {".weight.quant_state.bitsandbytes__nf4": state([2, 64], nested_blocksize=256, nested_offset=1)},
            r"absmax is F32 \[2\]; U8 \[2\] is needed",
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    parts, _ = nf4(torch.ones(2, 64))
    with pytest.raises(CheckpointError, match=f"'m' cannot be read as bitsandbytes: .*{message}"):
        read(tmp_path, {ending: part for ending, part in {**parts, **change}.items() if part is not None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({".weight_format": torch.tensor(1, dtype=torch.uint8)}, "weight_format is 1"),
        ({".weight": torch.ones(3, 64)}, r".weight is F32 \[3, 64\]; I8"),
        ({".SCB": torch.ones(4)}, r".SCB is F32 \[4\]"),
    ],
)
def test_quant_09_what_does_not_fit_8_bits_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    parts, _ = int8(torch.ones(3, 64))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, {**parts, **change})


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize(
    ("family", "written", "changes"),
    [
        ("Llama", nf4, {}),
        ("Qwen2", int8, {}),
        ("Qwen2", lambda weight: nf4(weight, 128), {"hidden_size": 64, "intermediate_size": 96}),
        ("Llama", nf4, {"hidden_size": 64, "intermediate_size": 88}),
        ("Qwen3Moe", nf4, EXPERTS),
    ],
)
def test_logits_are_those_of_the_values(
    device: str, family: str, written: Any, changes: dict[str, Any], tmp_path: Path
) -> None:
    published, values = twins(plain(tmp_path / "original", family, **changes), tmp_path, written, SAID)
    got, want = (Loaded(path, make_device(device)).logits(prompt(3, 40), [17]) for path in (published, values))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_int16_activations_come_close(tmp_path: Path) -> None:
    """8-bit weights are multiplied with activations of 16 bits by default."""
    published, values = twins(plain(tmp_path / "original", "Qwen2"), tmp_path, int8, SAID)
    want = Loaded(values, make_device("cpu")).logits(prompt(3, 40))
    got = Loaded(published, make_device("cpu", activations="int16")).logits(prompt(3, 40))
    assert 0 < np.abs(got - want).max() < 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("written", [nf4, int8])
def test_two_ranks_are_the_whole(written: Any, tmp_path: Path) -> None:
    wide = plain(tmp_path / "original", hidden_size=256, intermediate_size=256)  # blocks of 128 can be divided too
    published, values = twins(wide, tmp_path, written, SAID)
    want = Loaded(values, make_device("reference")).logits(prompt(3, 40))
    for got in split_logits(published, prompt(3, 40), 2)[0]:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def quantized(values: torch.Tensor) -> Stored:
    return quantize(RULES["bitsandbytes"], Stored("F32", *values.shape, values.numpy().view(np.uint8)))


def test_on_load_values_are_those_of_a_published_checkpoint() -> None:
    weight = torch.randn(24, 192, generator=torch.Generator().manual_seed(0))
    weight[3, 64:128] = 0
    got = quantized(weight)
    _, values = nf4(weight)
    values[3, 64:128] = 0
    assert got.kind == "NF4_32"
    np.testing.assert_array_equal(dense(got), values.numpy())
    _, values = nf4(weight[:, :96].contiguous(), block=32)
    values[3, 64:96] = 0
    np.testing.assert_array_equal(dense(quantized(weight[:, :96].contiguous())), values.numpy())


def test_start_up_says_what_it_is(tmp_path: Path) -> None:
    published, _ = twins(plain(tmp_path / "original"), tmp_path, nf4, SAID)
    built = build(EngineConfig(model=str(published), max_num_seqs=2))
    text = "\n".join(built.info.notes)
    assert "F32/NF4_32 weights" in text and "activations float32" in text
    assert built.info.quantization == "bitsandbytes"
    built.engine.close()


def test_experts_have_tensors_of_their_own(tmp_path: Path) -> None:
    published, _ = twins(plain(tmp_path / "original", "Qwen3Moe", **EXPERTS), tmp_path, nf4, SAID)
    names = load_file(published / "model.safetensors")
    assert sum(".experts." in name and name.endswith("__nf4") for name in names) == 4 * 3 * 2
