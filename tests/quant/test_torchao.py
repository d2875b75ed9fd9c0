"""Checkpoints as transformers saves them with torchao; see also test_samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.build import build
from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.config import EngineConfig
from octavo.ops.contract import Stored
from octavo.quant import dense
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.test_split import split_logits
from tests.models.tiny import Loaded
from tests.quant.twins import Parts, plain, the_matrix, twins

SAID = {"quant_method": "torchao", "quant_type": {"default": {}}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
INT8 = {"_type": "Int8Tensor", "_data": {"block_size": [1, 32]}}
INTX = {"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_type": "torch.dtype", "_data": "int4"}}}
INT4 = {"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}}
TILES = {"_type": "Int4TilePackedTo4dTensor", "_data": {"block_size": [1, 32], "shape": [12, 96]}}


def rounded(weight: torch.Tensor, most: int, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Signed integers [n_out, n_in / 32, 32] and scales [n_out, n_in / 32]."""
    groups = weight.reshape(len(weight), -1, 32)
    scale = (groups.abs().amax(-1).clamp_min(1e-6) / most).to(kind)
    return (groups / scale.float()[..., None]).round().clamp(-most - 1, most), scale


def int8(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    q, scale = rounded(weight, 127, torch.float32)
    parts = {"qdata": q.to(torch.int8).reshape(weight.shape), "scale": scale, "zero_point": torch.zeros(scale.shape)}
    return named(parts), (q * scale[..., None]).reshape(weight.shape)


def intx(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    q, scale = rounded(weight, 7, torch.bfloat16)
    zero = torch.ones(scale.shape, dtype=torch.int8)
    parts = {"qdata": q.to(torch.int8).reshape(weight.shape), "scale": scale, "zero_point": zero}
    return named(parts), ((q - 1) * scale.float()[..., None]).reshape(weight.shape)


def int4(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    q, scale = rounded(weight, 7, torch.bfloat16)
    codes = q.to(torch.int8).reshape(weight.shape)
    zero = (scale * 0.5).to(torch.bfloat16)
    parts = {
        "qdata": codes[:, ::2] & 15 | codes[:, 1::2] << 4,
        "scale": scale.T.contiguous(),
        "zero_point": zero.T.contiguous(),
    }
    s, z = scale.float()[..., None], zero.float()[..., None]
    return named(parts), ((q + 8) * s + (z - 8 * s)).reshape(weight.shape)


def named(parts: Parts) -> Parts:
    return {f"._weight_{name}": part for name, part in parts.items()}


def told(path: Path, said: dict[str, Any]) -> None:
    """Write into the file's metadata what the class of every quantized weight is."""
    tensors = load_file(path / "model.safetensors")
    weights = [name.replace("._weight_qdata", ".weight") for name in tensors if name.endswith("_qdata")]
    assert weights
    save_file(tensors, path / "model.safetensors", {name: json.dumps(said) for name in weights})


def read(folder: Path, parts: Parts, said: dict[str, Any]) -> Stored:
    save_file({f"m{ending}": part for ending, part in parts.items()}, folder / "model.safetensors")
    told(folder, said)
    (folder / "config.json").write_text(json.dumps({"quantization_config": SAID}))
    return the_matrix(folder)


def test_by_hand(tmp_path: Path) -> None:
    """Int4Tensor: the low half of a byte comes first, and has a sign; scales of a group are a row."""
    packed = torch.zeros(2, 32, dtype=torch.int8)
    packed[0, 0], packed[1, 31] = 0x78, -1
    scale, zero = torch.tensor([[1.0, 2], [4, 8]]), torch.tensor([[0.5, 0], [0, 1]])
    stored = read(tmp_path, named({"qdata": packed, "scale": scale, "zero_point": zero}), INT4)
    assert stored.kind == "INT4_32"
    want = np.array([[0.5] * 32 + [0] * 32, [0] * 32 + [1] * 32], np.float32)
    want[0, 0], want[0, 1], want[1, 62], want[1, 63] = -7.5, 7.5, -7, -7
    np.testing.assert_array_equal(dense(stored), want)


def test_tiles_by_hand(tmp_path: Path) -> None:
    """Where PyTorch's kernel puts a number: row 8 i + t / 4 in word [i, k / 128, t, k % 128 / 32]; of two tiles of 16
    columns, thread t has 2 (t % 4) + 0, 1, 8 and 9 of each, in half bytes 0, 4, 1, 5, and 2, 6, 3, 7."""
    words = torch.zeros(2, 8, 32, 4, dtype=torch.int64)
    words[0, 0, 0, 0] = 0x00000001  # row 0, column 0
    words[0, 0, 6, 0] = 0x00020000  # row 1, columns of t % 4 = 2: 4 + 1
    words[1, 0, 15, 1] = 0x00000030  # row 11, columns of t % 4 = 3 from 32 on: 38 + 8
    words[1, 0, 12, 2] = 0x40000000  # row 11, column 64 + 16 + 9
    both = torch.zeros(32, 16, 2)
    both[:, :, 0], both[1, 11, 0], both[1, 11, 1] = 1, 2, 0.5
    parts = named({"qdata": words.to(torch.int32), "scale_and_zero": both.bfloat16()})
    save_file({f"m{ending}": part for ending, part in parts.items()}, tmp_path / "model.safetensors")
    told(tmp_path, TILES)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": SAID}))
    want = np.full((12, 96), -8, np.float32)
    want[11, 32:64] = -15.5
    want[0, 0], want[1, 5], want[11, 46], want[11, 89] = -7, -6, -9.5, -4
    stored = the_matrix(tmp_path)
    assert stored.kind == "INT4_32"
    np.testing.assert_array_equal(dense(stored), want)


@pytest.mark.parametrize(
    ("quantize", "said", "kind"), [(int8, INT8, "INT8_32"), (intx, INTX, "INT4_32"), (int4, INT4, "INT4_32")]
)
def test_values_are_exact(quantize: Any, said: dict[str, Any], kind: str, tmp_path: Path) -> None:
    parts, values = quantize(torch.randn(40, 96, generator=torch.Generator().manual_seed(0)))
    stored = read(tmp_path, parts, said)
    assert stored.kind == kind
    np.testing.assert_array_equal(dense(stored), values.numpy())


@pytest.mark.parametrize(
    ("change", "said", "message"),
    [
        ({}, {"_type": "Int4PreshuffledTensor"}, "it is a Int4PreshuffledTensor; Int8Tensor, IntxUnpacked"),
        (
            {},
            {"_type": "Int4TilePackedTo4dTensor"},
            r"qdata is I8 \[4, 64\] and ._weight_scale_and_zero not there; I32",
        ),
        ({"qdata": torch.zeros(1, 8, 32, 4, dtype=torch.int32), "scale_and_zero": torch.ones(32, 4, 2)}, TILES, "rows"),
        ({}, "text", "the metadata of its file does not say what it is"),
        ({"act_pre_scale": torch.ones(64)}, INT8, "act_pre_scale .* is not supported"),
        ({"qdata": torch.zeros(4, 64, dtype=torch.uint8)}, INT8, r"qdata is U8 \[4, 64\] and ._weight_scale F32; I8"),
        ({"zero_point": torch.zeros(4, 1)}, INT8, r"zero_point has shape \[4, 1\] and ._weight_scale \[4, 2\]"),
        ({"scale": torch.ones(4, 3), "zero_point": torch.zeros(4, 3)}, INT8, r"scale has shape \[4, 3\], which does"),
        ({}, INT4, r"\[groups of a multiple of 32, 4\]"),
        ({}, {"_type": "Float8Tensor"}, r"qdata is I8 \[4, 64\]"),
    ],
)
def test_quant_09_what_cannot_be_read_is_refused(tmp_path: Path, change: Parts, said: Any, message: str) -> None:
    parts, _ = int8(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(CheckpointError, match=f"'m' cannot be read as torchao: .*{message}"):
        read(tmp_path, parts | named(change), said)


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize(
    ("family", "quantize", "said", "changes"),
    [("Llama", int4, INT4, {}), ("Qwen2", int8, INT8, {}), ("Qwen3Moe", intx, INTX, EXPERTS)],
)
def test_logits_are_those_of_the_values(
    device: str, family: str, quantize: Any, said: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    published, values = twins(plain(tmp_path / "original", family, **changes), tmp_path, quantize, SAID)
    told(published, said)
    got, want = (Loaded(path, make_device(device)).logits(prompt(3, 40), [17]) for path in (published, values))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_two_ranks_are_the_whole(tmp_path: Path) -> None:
    published, values = twins(plain(tmp_path / "original"), tmp_path, int8, SAID)
    told(published, INT8)
    want = Loaded(values, make_device("reference")).logits(prompt(3, 40))
    for got in split_logits(published, prompt(3, 40), 2)[0]:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_start_up_says_what_it_is(tmp_path: Path) -> None:
    published, _ = twins(plain(tmp_path / "original"), tmp_path, intx, SAID)
    told(published, INTX)
    built = build(EngineConfig(model=str(published), quantization="torchao", max_num_seqs=2))
    text = "\n".join(built.info.notes)
    assert "F32/INT4_32 weights" in text and "activations int8" in text
    built.engine.close()


def test_pickled_tensors_of_torchao_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """They need classes of torchao, which the restricted unpickler does not make."""
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": SAID}))
    torch.save({"m.weight": torch.nn.Linear(2, 2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds more than tensors .* Get the model as safetensors"):
        open_checkpoint(tmp_path)
