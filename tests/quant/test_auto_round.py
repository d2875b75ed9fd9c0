"""Checkpoints as AutoRound packs them; see also tests/models/test_gptq_awq.

Tensors and values were compared with what the packers of AutoRound 0.16.1 write (GPTQ's layout with zero points less
one, AWQ's, MXFP4, MXFP8) and were the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.checkpoint import CheckpointError
from octavo.ops.contract import Stored
from octavo.quant import dense
from tests.quant import packing
from tests.quant.twins import Parts, the_matrix

MATRIX = packing.rounded(
    np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32), 4, packing.consecutive(64, 32)
)
EXPONENTS = torch.tensor([[127, 128], [126, 127]], dtype=torch.uint8)


def read(folder: Path, parts: Parts, **said: Any) -> Stored:
    said = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "int"} | said
    (folder / "config.json").write_text(json.dumps({"quantization_config": said}))
    save_file({f"m.{name}": part.contiguous() for name, part in parts.items()}, folder / "model.safetensors")
    return the_matrix(folder)


def torched(parts: dict[str, Any]) -> Parts:
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
@pytest.mark.parametrize(
    ("form", "parts"),
    [
        ("auto_round:auto_gptq", packing.gptq(MATRIX, 1, with_index=False)),
        ("auto_round:gptq", packing.gptq(MATRIX, 1)),
        ("auto_round", packing.gptq(MATRIX, 2, with_index=False)),
        ("auto_round:gptqmodel", packing.gptq(MATRIX, 2, with_index=False)),
        ("auto_round:auto_awq", packing.awq(MATRIX)),
    ],
)
def test_every_packing_gives_the_same_matrix(method: str, form: str, parts: dict[str, Any], tmp_path: Path) -> None:
    stored = read(tmp_path, torched(parts), quant_method=method, packing_format=form)
    assert stored.kind == "INT4_32"
    np.testing.assert_array_equal(dense(stored), MATRIX.values)


def test_without_a_packing_it_is_gptq_with_zero_points_less_one(tmp_path: Path) -> None:
    np.testing.assert_array_equal(dense(read(tmp_path, torched(packing.gptq(MATRIX, 1)))), MATRIX.values)


def test_floats_of_4_bits_by_hand(tmp_path: Path) -> None:
    """MXFP4: the first number of a byte in its low half; scales 2^(e - 127)."""
    codes = torch.zeros(2, 32, dtype=torch.uint8)
    codes[0, 0], codes[1, 31] = 0x2F, 0x70
    parts = {"weight_packed": codes, "weight_scale": EXPONENTS}
    stored = read(tmp_path, parts, packing_format="auto_round:llm_compressor", data_type="mx_fp")
    want = np.zeros((2, 64), np.float32)
    want[0, 0], want[0, 1], want[1, 63] = -6, 1, 6
    assert stored.kind == "MXFP4"
    np.testing.assert_array_equal(dense(stored), want)


def test_floats_of_8_bits(tmp_path: Path) -> None:
    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    said = {"bits": 8, "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"}
    stored = read(tmp_path, {"weight": weight, "weight_scale": EXPONENTS}, **said)
    by = torch.exp2(EXPONENTS.float() - 127).repeat_interleave(32, 1)
    assert stored.kind == "F8_E4M3_32"
    np.testing.assert_array_equal(dense(stored), (weight.float() * by).numpy())


def test_static_fp8(tmp_path: Path) -> None:
    weight, scale = torch.full((4, 32), 2.0).to(torch.float8_e4m3fn), torch.tensor([1.0, 2, 3, 4])
    parts = {"weight": weight, "weight_scale": scale, "input_scale": torch.ones(1)}
    stored = read(tmp_path, parts, packing_format="auto_round:fp8_static", data_type="fp")
    np.testing.assert_array_equal(dense(stored), np.repeat([[2.0], [4], [6], [8]], 32, axis=1))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"packing_format": "mlx"}, "packing_format is 'mlx'; supported are auto_round, auto_round:auto_gptq"),
        ({"packing_format": "auto_round:fake"}, "packing_format is 'auto_round:fake'"),
        ({"packing_format": "auto_round:llm_compressor", "data_type": "mx_int"}, "data_type is 'mx_int'"),
        ({"packing_format": "auto_round:auto_gptq", "bits": 5}, "bits is 5"),
    ],
)
def test_quant_09_what_is_not_supported_is_named(said: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, torched(packing.gptq(MATRIX)), **said)


def test_floats_without_scales_are_refused(tmp_path: Path) -> None:
    parts = {"weight_packed": torch.zeros(2, 32, dtype=torch.uint8)}
    with pytest.raises(CheckpointError, match=r"weight_packed and weight_scale \[n_out, groups\] are needed"):
        read(tmp_path, parts, packing_format="auto_round:llm_compressor", data_type="nv_fp")
