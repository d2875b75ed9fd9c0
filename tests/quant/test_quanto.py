"""Checkpoints as optimum-quanto saves them; see also test_samples."""

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
from octavo.models.weights import LoadError
from octavo.ops.contract import Stored
from octavo.ops.reference import ReferenceDevice
from octavo.quant import dense
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.test_split import split_logits
from tests.models.tiny import Loaded
from tests.quant.twins import Parts, plain, the_matrix, twins

SAID = {"quant_method": "quanto", "weights": "int4"}


def int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scale).round().to(torch.int8)
    return {".weight._data": q, ".weight._scale": scale} | activations(), q * scale


def small(weight: torch.Tensor, bits: int, group: int) -> tuple[Parts, torch.Tensor]:
    """Groups one after another; the first of them in the lowest bits of the bytes."""
    groups = weight.reshape(-1, group)
    low = groups.amin(1, keepdim=True)
    scale = (groups.amax(1, keepdim=True) - low) / (2**bits - 1)
    q = ((groups - low) / scale).round().to(torch.uint8)
    lines = -(-len(q) * bits // 8)
    packed = torch.zeros(lines, group, dtype=torch.uint8)
    for place, start in enumerate(range(0, len(q), lines)):
        part = q[start : start + lines]
        packed[: len(part)] |= part << bits * place
    parts = {".weight._data._data": packed, ".weight._scale": scale, ".weight._shift": -low}
    return parts | activations(), (scale * q - -low).reshape(weight.shape)


def int4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    return small(weight, 4, 128 if weight.shape[1] % 128 == 0 else 64)


def int2(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    return small(weight, 2, 64)


def activations() -> Parts:
    return {".input_scale": torch.ones(()), ".output_scale": torch.ones(())}


def read(folder: Path, parts: Parts) -> Stored:
    save_file({f"m{ending}": part for ending, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": SAID}))
    return the_matrix(folder)


def test_scales_of_activations_are_none_of_a_cache(tmp_path: Path) -> None:
    """Every module has an output_scale: k_proj and v_proj too, where other makers' is that of an FP8 cache."""
    published, _ = twins(plain(tmp_path / "original"), tmp_path, int8, SAID | {"weights": "int8"})
    built = build(EngineConfig(model=str(published), max_num_seqs=2))
    built.engine.close()
    assert not [note for note in built.info.notes if "scales" in note]


def test_4_bits_by_hand(tmp_path: Path) -> None:
    """Three groups in two rows of bytes: the third is in the high half of the first."""
    packed = torch.zeros(2, 32, dtype=torch.uint8)
    packed[0, 0], packed[1, 31] = 0x5F, 0x02
    scale, shift = torch.tensor([[0.5], [2], [4]]), torch.tensor([[1.0], [-1], [0]])
    parts = {".weight._data._data": packed, ".weight._scale": scale, ".weight._shift": shift}
    want = np.array([[-1] * 32, [1] * 32, [0] * 32], np.float32)
    want[0, 0], want[1, 31], want[2, 0] = 6.5, 5, 20
    stored = read(tmp_path, parts)
    assert stored.kind == "INT4_32"
    np.testing.assert_array_equal(dense(stored), want)
    whole = parts | {".weight._shift": torch.tensor([[1], [2], [3]], dtype=torch.int8)}
    want = np.array([[-0.5] * 32, [-4] * 32, [-12] * 32], np.float32)
    want[0, 0], want[1, 31], want[2, 0] = 7, 0, 8
    np.testing.assert_array_equal(dense(read(tmp_path, whole)), want)


def test_a_module_that_was_left_in_floats(tmp_path: Path) -> None:
    weight = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored = read(tmp_path, {".weight": weight} | activations())
    assert stored.kind == "BF16"
    np.testing.assert_array_equal(dense(stored), weight.float().numpy())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({".weight._scale": torch.ones(4, 1)}, "weight._scale in floats and a matrix weight._data"),
        (
            {".weight._data": torch.zeros(4, 32), ".weight._scale": torch.ones(4, 1)},
            r"_data is F32 \[4, 32\] and _scale \[4, 1\]; I8 or F8_E4M3",
        ),
        (
            {".weight._data._data": torch.zeros(4, 32).byte(), ".weight._scale": torch.ones(8, 1)},
            r"_scale \[8, 1\] and _shift not there; uint8",
        ),
        (
            {
                ".weight._data._data": torch.zeros(4, 32).byte(),
                ".weight._scale": torch.ones(9, 1),
                ".weight._shift": torch.ones(9, 1),
            },
            r"_data._data is U8 \[4, 32\], _scale \[9, 1\] and _shift F32 \[9, 1\]",
        ),
    ],
)
def test_quant_09_what_does_not_fit_is_refused(parts: Parts, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"'m' cannot be read as quanto: .*{message}"):
        read(tmp_path, parts)


def by_map(path: Path) -> None:
    """Say it as quanto's own `save_pretrained` does: in quanto_qmap.json alone."""
    settings = json.loads((path / "config.json").read_text())
    del settings["quantization_config"]
    (path / "config.json").write_text(json.dumps(settings))
    said = {"model.layers.0.self_attn.q_proj": {"weights": "qint4", "activations": "none"}}
    (path / "quanto_qmap.json").write_text(json.dumps(said))


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize(("family", "quantize"), [("Llama", int4), ("Qwen2", int8), ("Llama", int2)])
def test_logits_are_those_of_the_values(device: str, family: str, quantize: Any, tmp_path: Path) -> None:
    published, values = twins(plain(tmp_path / "original", family), tmp_path, quantize, SAID)
    by_map(published)
    got, want = (Loaded(path, make_device(device)).logits(prompt(3, 40), [17]) for path in (published, values))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("quantize", [int4, int8])
def test_two_ranks_are_the_whole(quantize: Any, tmp_path: Path) -> None:
    published, values = twins(plain(tmp_path / "original"), tmp_path, quantize, SAID)
    want = Loaded(values, make_device("reference")).logits(prompt(3, 40))
    for got in split_logits(published, prompt(3, 40), 2)[0]:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_groups_that_are_not_the_models_matrix_do_not_load(tmp_path: Path) -> None:
    def short(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        return small(weight[:-2], 4, 64)[0], weight

    published, _ = twins(plain(tmp_path / "original"), tmp_path, short, SAID)
    with pytest.raises(LoadError, match=r"q_proj.weight has shape \[\d+, 64\], \[128, 128\] is needed"):
        Loaded(published, ReferenceDevice())
