"""ModelOpt's integers; its floats are in test_fp8, matrices that it wrote in test_samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.ops.contract import Stored
from octavo.quant import dense
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.test_split import split_logits
from tests.models.tiny import Loaded
from tests.quant.twins import Parts, plain, the_matrix, twins

SAID = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64}


def read(folder: Path, parts: Parts) -> Stored:
    save_file({f"m.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": SAID}))
    return the_matrix(folder)


def test_two_rows_in_a_byte_by_hand(tmp_path: Path) -> None:
    packed = torch.zeros(2, 64, dtype=torch.uint8)
    packed[0, 0], packed[1, 63] = 0x78, 0xF1
    scale = torch.tensor([[1.0, 2], [0.5, 1], [4, 8], [1, 1]])
    want = np.zeros((4, 64), np.float32)
    want[0, 0], want[1, 0], want[2, 63], want[3, 63] = -8, 3.5, 8, -1
    stored = read(tmp_path, {"weight": packed, "weight_scale": scale, "weight_scale_2": torch.tensor(3.0)})
    assert stored.kind == "INT4_32"
    np.testing.assert_array_equal(dense(stored), want)
    smooth = torch.arange(64.0)
    stored = read(tmp_path, {"weight": packed, "weight_scale": scale, "pre_quant_scale": smooth})
    assert stored.kind == "F32"
    np.testing.assert_array_equal(dense(stored), want * np.arange(64, dtype=np.float32))


def awq(weight: torch.Tensor, group: int = 64) -> tuple[Parts, torch.Tensor]:
    by = (weight.reshape(len(weight), -1, group).abs().amax(-1) / 7).half()
    wide = by.float().repeat_interleave(group, 1)
    q = (weight / wide).round().clamp(-8, 7).to(torch.int8)
    packed = (q[::2] & 15 | q[1::2] << 4).view(torch.uint8)
    return {".weight": packed, ".weight_scale": by, ".input_scale": torch.ones(())}, q * wide


def smoothed(weight: torch.Tensor, group: int = 64) -> tuple[Parts, torch.Tensor]:
    smooth = torch.linspace(0.5, 1.5, weight.shape[1])
    parts, values = awq(weight / smooth, group)
    return parts | {".pre_quant_scale": smooth}, values * smooth


def int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    by = weight.abs().amax(-1).clamp_min(1e-6) / 127
    q = (weight / by[:, None]).round().to(torch.int8)
    return {".weight": q, ".weight_scale": by}, q * by[:, None]


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("quantize", [awq, smoothed, int8])
def test_logits_are_those_of_the_values(device: str, quantize: Any, tmp_path: Path) -> None:
    published, values = twins(plain(tmp_path / "original"), tmp_path, quantize, SAID)
    got, want = (Loaded(path, make_device(device)).logits(prompt(3, 40), [17]) for path in (published, values))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_two_ranks_are_the_whole(tmp_path: Path) -> None:
    published, values = twins(plain(tmp_path / "original"), tmp_path, awq, SAID)
    want = Loaded(values, make_device("reference")).logits(prompt(3, 40))
    for got in split_logits(published, prompt(3, 40), 2)[0]:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"weight": torch.zeros(2, 64).byte(), "weight_scale": torch.ones(3, 2)}, r"weight_scale F32 \[3, 2\]; uint8"),
        ({"weight": torch.zeros(2, 64).char(), "weight_scale": torch.ones(3)}, r"weight_scale F32 \[3\]; int8"),
        (
            {"weight": torch.zeros(2, 64).byte(), "weight_scale": torch.ones(4, 2), "pre_quant_scale": torch.ones(32)},
            r"pre_quant_scale is F32 \[32\]; \[64\] is needed",
        ),
        ({"weight_scale": torch.ones(3)}, "it has weight_scale, but no weight"),
    ],
)
def test_quant_09_what_does_not_fit_is_refused(parts: Parts, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"'m' cannot be read as modelopt: .*{message}"):
        read(tmp_path, parts)


def test_stacks_of_floats_of_8_bits(tmp_path: Path) -> None:
    """For x @ W, with one scale for all experts."""
    weight = torch.randn(3, 32, 5, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    parts = {"x_proj": weight, "x_proj_weight_scale": torch.tensor(0.25), "x_proj_input_scale": torch.tensor(2.0)}
    got = stack(tmp_path, parts, "F8_E4M3_32", (3, 5, 32))
    np.testing.assert_array_equal(got, (weight.float() * 0.25).mT.numpy())


def test_stacks_of_nvfp4(tmp_path: Path) -> None:
    codes = torch.zeros(2, 16, 3, dtype=torch.uint8)  # [E, n_in / 2, n_out]
    codes[0, 0, 1], codes[1, 15, 2] = 0x2F, 0x70
    scale = torch.ones(2, 2, 3)
    scale[0, 0, 1], scale[1, 1, 2] = 2, 4
    parts = {"x_proj": codes, "x_proj_weight_scale": scale.to(torch.float8_e4m3fn)}
    got = stack(tmp_path, parts | {"x_proj_weight_scale_2": torch.tensor(0.5)}, "E2M1_16", (2, 3, 32))
    want = np.zeros((2, 3, 32), np.float32)
    want[0, 1, 0], want[0, 1, 1], want[1, 2, 31] = -6, 1, 12
    np.testing.assert_array_equal(got, want)


def stack(folder: Path, parts: Parts, kind: str, shape: tuple[int, ...]) -> Any:
    """The values of m.x_proj.weight, as its header says it."""
    save_file({f"m.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": SAID}))
    with open_checkpoint(folder) as checkpoint:
        name = "m.x_proj.weight"
        assert checkpoint.names() == {name}
        assert (checkpoint.kind(name), checkpoint.shape(name)) == (kind, shape)
        return np.stack([dense(checkpoint.stored(name, e)) for e in range(shape[0])])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"x_proj_weight_scale": torch.ones(2)}, "_proj is not there; U8 or F8_E4M3"),
        (
            {"x_proj": torch.zeros(2, 32, 4).to(torch.float8_e4m3fn), "x_proj_weight_scale": torch.ones(3)},
            r"_proj_weight_scale is \[3\] beside \[2, 32, 4\]",
        ),
    ],
)
def test_stacks_that_do_not_fit_are_refused(parts: Parts, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"'m.x' cannot be read as modelopt: .*{message}"):
        stack(tmp_path, parts, "", ())
