"""Checkpoints in FP8, and float checkpoints that become FP8 while they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from octavo.build import build
from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.config import EngineConfig
from octavo.ops.contract import Stored
from octavo.ops.reference import ReferenceDevice
from octavo.quant import dense
from octavo.quant.onload import RULES, quantize
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.test_split import split_logits
from tests.models.tiny import Loaded, make
from tests.quant.twins import Parts, plain, the_matrix, twins

CELL = [128, 128]


def checkpoint(folder: Path, tensors: Parts, said: dict[str, Any]) -> Path:
    save_file({f"m.{name}": tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": said}))
    return folder


def read(folder: Path, tensors: Parts, said: dict[str, Any]) -> Stored:
    """The matrix "m"."""
    return the_matrix(checkpoint(folder, tensors, said))


def codes(rows: int, columns: int, kind: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return (torch.randn(rows, columns, generator=generator) * 30).to(kind)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7)) + 0.1


def test_known_codes(tmp_path: Path) -> None:
    bytes_ = torch.tensor([[0x38, 0x40, 0x7E, 0x81, 0x80, 0xC4] + [0] * 26], dtype=torch.uint8)
    tensors = {"weight": bytes_.view(torch.float8_e4m3fn), "weight_scale": torch.tensor(0.5)}
    stored = read(tmp_path, tensors, {"quant_method": "fp8"})
    assert stored.kind == "F8_E4M3_32"
    want = [0.5, 1, 224, -(2**-10), 0, -1.5] + [0] * 26
    np.testing.assert_array_equal(dense(stored)[0], np.array(want, np.float32))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (96,), (96, 1)])
@pytest.mark.parametrize("scale", [torch.float32, torch.bfloat16])
def test_one_scale_or_one_per_row(
    kind: torch.dtype, shape: tuple[int, ...], scale: torch.dtype, tmp_path: Path
) -> None:
    weight, by = codes(96, 64, kind), scales(*shape).to(scale)
    said = {"quant_method": "fp8", "activation_scheme": "static"}
    stored = read(tmp_path, {"weight": weight, "weight_scale": by, "input_scale": torch.tensor(3.0)}, said)
    assert stored.kind == ("F8_E4M3_32" if kind == torch.float8_e4m3fn else "F8_E5M2_32")
    wide = by[:, None] if by.ndim == 1 else by
    np.testing.assert_array_equal(dense(stored), (weight.float() * wide.float()).numpy())


@pytest.mark.parametrize(("rows", "columns", "cell"), [(192, 160, CELL), (256, 384, CELL), (64, 96, [32, 64])])
def test_quant_06_blocks_at_the_end_may_be_cut(rows: int, columns: int, cell: list[int], tmp_path: Path) -> None:
    weight, by = codes(rows, columns), scales(-(-rows // cell[0]), -(-columns // cell[1]))
    said = {"quant_method": "fp8", "weight_block_size": cell}
    stored = read(tmp_path, {"weight": weight, "weight_scale_inv": by}, said)
    assert stored.kind == "F8_E4M3_32"
    want = [[float(weight[i, j]) * float(by[i // cell[0], j // cell[1]]) for j in range(columns)] for i in range(rows)]
    np.testing.assert_array_equal(dense(stored), np.array(want, np.float32))
    theirs = _dequantize_fp8_weight(weight, by, cell, torch.float32)
    np.testing.assert_array_equal(dense(stored), theirs.numpy())


def test_scales_may_be_powers_of_two(tmp_path: Path) -> None:
    weight, exponents = codes(128, 128), torch.tensor([[124]], dtype=torch.uint8)
    tensors = {"weight": weight, "weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    stored = read(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": CELL, "scale_fmt": "ue8m0"})
    np.testing.assert_array_equal(dense(stored), weight.float().numpy() / 8)


def test_what_fills_no_blocks_becomes_float32(tmp_path: Path) -> None:
    for columns, cell in ((36, CELL), (64, [16, 16])):
        weight, by = codes(40, columns), scales(-(-40 // cell[0]), -(-columns // cell[1]))
        folder = tmp_path / str(columns)
        folder.mkdir()
        said = {"quant_method": "fp8", "weight_block_size": cell}
        stored = read(folder, {"weight": weight, "weight_scale_inv": by}, said)
        assert stored.kind == "F32"
        np.testing.assert_array_equal(dense(stored), _dequantize_fp8_weight(weight, by, cell, torch.float32).numpy())


@pytest.mark.parametrize(
    ("tensors", "said", "message"),
    [
        ({"weight_scale": scales(1)}, {}, "it has .weight_scale, but no .weight"),
        ({"weight": codes(4, 32), "weight_scale": scales(3)}, {}, r"scales \[3\]; one, one per row can be read"),
        (
            {"weight": codes(200, 64), "weight_scale_inv": scales(1, 1)[[0, 0, 0]]},
            {"weight_block_size": CELL},
            r"scales \[3, 1\]; one, one per row or one per block of \[128, 128\]",
        ),
        (
            {"weight": torch.ones(4, 32), "weight_scale": scales(1)},
            {},
            r"\.weight is F32 \[4, 32\]; a matrix of F8_E4M3",
        ),
        ({"weight": codes(4, 32), "weight_scale": torch.ones(1, dtype=torch.int32)}, {}, "has the type I32"),
        ({"weight": codes(4, 32)}, {"weight_block_size": [128]}, r"weight_block_size is \[128\]; rows and columns"),
    ],
)
def test_what_does_not_fit_is_refused(tensors: Parts, said: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(checkpoint(tmp_path, tensors, {"quant_method": "fp8", **said}))


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_modelopt(algorithm: str, tmp_path: Path) -> None:
    if algorithm == "FP8":
        tensors = {"weight": codes(8, 64), "weight_scale": torch.tensor(0.3)}
        want = tensors["weight"].float() * 0.3
    else:
        packed = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
        by, whole = codes(8, 4).abs(), torch.tensor(0.0123)
        tensors = {"weight": packed, "weight_scale": by, "weight_scale_2": whole}
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        table = torch.cat([table, -table])
        values = torch.stack([table[packed.int() & 15], table[packed.int() >> 4]], -1).reshape(8, 64)
        want = values * (by.float() * whole).repeat_interleave(16, dim=1)
    said = {"quant_method": "modelopt", "quant_algo": algorithm}
    stored = read(tmp_path, tensors | {"input_scale": torch.tensor(0.1)}, said)
    assert stored.kind == ("F8_E4M3_32" if algorithm == "FP8" else "E2M1_16")
    np.testing.assert_array_equal(dense(stored), want.numpy())


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    def scaled(tensor: torch.Tensor) -> tuple[Parts, torch.Tensor]:
        weight, by, values = rounded(tensor, tuple(tensor.shape))  # type: ignore[arg-type]
        return {".weight": weight, ".weight_scale": by.reshape(())}, values

    path, want = twins(plain(tmp_path / "original"), tmp_path, scaled, {})
    settings = json.loads((path / "config.json").read_text())
    del settings["quantization_config"]
    (path / "config.json").write_text(json.dumps(settings))
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (path / "hf_quant_config.json").write_text(json.dumps(said))
    ids = prompt(2, 20)
    got, expected = (Loaded(p, ReferenceDevice()).logits(ids) for p in (path, want))
    np.testing.assert_array_equal(got, expected)
    build(EngineConfig(model=str(path), device="reference", quantization="modelopt", max_num_seqs=2)).engine.close()


def test_modelopt_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="quant_algo is 'NVFP4_SVD'; FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO"):
        open_checkpoint(checkpoint(tmp_path, {}, {"quant_method": "modelopt", "quant_algo": "NVFP4_SVD"}))


def test_stacks_by_hand(tmp_path: Path) -> None:
    """Two experts of 32 inputs and one or two outputs; a scale per output, whichever way it lies."""
    weight = torch.zeros(2, 32, 2).to(torch.float8_e4m3fn)
    weight[0, 3, 1], weight[1, 31, 0] = 1.5, -2
    for shape in ((2, 1, 2), (2, 2, 1)):
        tensors = {"x_proj": weight, "x_proj_scale": torch.tensor([[2.0, 4], [8, 16]]).reshape(shape)}
        with open_checkpoint(checkpoint(tmp_path, tensors, {"quant_method": "fbgemm_fp8"})) as opened:
            assert opened.names() == {"m.x_proj.weight"} and opened.shape("m.x_proj.weight") == (2, 2, 32)
            first, second = (opened.stored("m.x_proj.weight", e) for e in range(2))
        assert first.kind == second.kind == "F8_E4M3_32"
        want = np.zeros((2, 2, 32), np.float32)
        want[0, 1, 3], want[1, 0, 31] = 6, -16
        np.testing.assert_array_equal([dense(first), dense(second)], want)


def test_stacks_with_scales_per_block(tmp_path: Path) -> None:
    weight, by = codes(2 * 96, 64).reshape(2, 96, 64), scales(2, 3, 2)
    said = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    with open_checkpoint(checkpoint(tmp_path, {"x_proj": weight, "x_proj_scale_inv": by}, said)) as opened:
        assert opened.shape("m.x_proj") == (2, 96, 64) and opened.kind("m.x_proj") == "F8_E4M3_32"
        for e in range(2):
            theirs = _dequantize_fp8_weight(weight[e], by[e], [32, 32], torch.float32)
            np.testing.assert_array_equal(dense(opened.stored("m.x_proj", e)), theirs.numpy())


def test_stacks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    tensors = {"x_proj": codes(2 * 32, 4).reshape(2, 32, 4), "x_proj_scale": scales(2, 1, 32)}
    with pytest.raises(
        CheckpointError, match=r"_proj_scale is \[2, 1, 32\]; \[2, 1, 4\] is needed beside \[2, 32, 4\]"
    ):
        open_checkpoint(checkpoint(tmp_path, tensors, {"quant_method": "fbgemm_fp8"}))
    with pytest.raises(CheckpointError, match=r"_proj is not there and its scales \[2, 1, 32\]"):
        open_checkpoint(checkpoint(tmp_path, {"x_proj_scale": scales(2, 1, 32)}, {"quant_method": "fbgemm_fp8"}))


@pytest.mark.parametrize("device", NAMES)
def test_llama_4_as_fbgemm_writes_it(device: str, tmp_path: Path) -> None:
    """Its experts are stacks for x @ W, and stay floats of 8 bits."""
    original, _ = make("llama4", tmp_path / "original")
    quantized: Parts = {}
    values: Parts = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "experts.down_proj")):
            by = tensor.abs().amax(1, keepdim=True) / 448
            quantized[name] = (tensor / by).to(torch.float8_e4m3fn)
            quantized[name + "_scale"] = by if "gate_up" in name else by.mT.contiguous()
            values[name] = quantized[name].float() * by
        else:
            quantized[name] = values[name] = tensor
    config = json.loads((original / "config.json").read_text())
    paths = (tmp_path / "quantized", tmp_path / "values")
    for path, tensors, more in zip(
        paths, (quantized, values), ({"quantization_config": {"quant_method": "fbgemm_fp8"}}, {}), strict=True
    ):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | more))
    with open_checkpoint(paths[0]) as opened:
        stacks = {opened.kind(name) for name in opened.names() if "experts." in name and "shared" not in name}
    assert stacks == {"F8_E4M3_32"}
    got, want = (Loaded(path, make_device(device)).logits(prompt(3, 40), [17]) for path in paths)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def rounded(tensor: torch.Tensor, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales for rectangles of `shape`, and values."""
    rows, columns = (range(0, n, step) for n, step in zip(tensor.shape, shape, strict=True))
    by = torch.tensor([[tensor[i : i + shape[0], j : j + shape[1]].abs().max() / 448 for j in columns] for i in rows])
    wide = by.repeat_interleave(shape[0], 0)[: len(tensor)].repeat_interleave(shape[1], 1)[:, : tensor.shape[1]]
    weight = (tensor / wide).to(torch.float8_e4m3fn)
    return weight, by, weight.float() * wide


def per_tensor(tensor: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    weight, by, values = rounded(tensor, tuple(tensor.shape))  # type: ignore[arg-type]
    return {".weight": weight, ".weight_scale": by.reshape(()), ".input_scale": torch.tensor(0.7)}, values


def per_channel(tensor: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    weight, by, values = rounded(tensor, (1, tensor.shape[1]))
    return {".weight": weight, ".weight_scale": by}, values


def per_block(tensor: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    weight, by, values = rounded(tensor, (128, 128))
    return {".weight": weight, ".weight_scale_inv": by}, values


MODELS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "tensor": ("Llama", {}, per_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "channel-biased": ("Qwen2", {}, per_channel, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "block-cut": (  # QUANT-06: 192 x 160
        "Llama",
        {"hidden_size": 160, "num_attention_heads": 5, "num_key_value_heads": 5},
        per_block,
        {"quant_method": "fp8", "weight_block_size": CELL, "activation_scheme": "dynamic"},
    ),
    "block-experts": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160, "head_dim": 32},
        per_block,
        {"quant_method": "fp8", "weight_block_size": CELL, "modules_to_not_convert": ["lm_head"]},
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(published, dequantized)."""
    family, changes, convert, said = MODELS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return twins(plain(folder / "original", family, **changes), folder, convert, said)


@pytest.mark.parametrize("device", NAMES)
def test_quant_06_models_equal_their_dequantized_values(device: str, pair: tuple[Path, Path]) -> None:
    """Products of the CPU add the elements of a block before they are scaled: float32 rounds elsewhere."""
    ids = prompt(3, 60)
    got, want = (Loaded(path, make_device(device)).logits(ids, [17]) for path in pair)
    bound = 2e-6 * np.abs(want).max() if device == "cpu" else 0
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def test_start_up_says_what_it_is(pair: tuple[Path, Path]) -> None:
    said = json.loads((pair[0] / "config.json").read_text())["quantization_config"]["quant_method"]
    built = build(EngineConfig(model=str(pair[0]), quantization=said, max_num_seqs=2))
    notes = "\n".join(built.info.notes)
    assert "F32/F8_E4M3_32 weights" in notes
    assert "activations float32 because the weights are quantized to floats" in notes
    built.engine.close()


def test_two_ranks_divide_rows_and_columns(tmp_path: Path) -> None:
    changes = {"intermediate_size": 512}
    said = {"quant_method": "fp8", "weight_block_size": CELL}
    path, _ = twins(plain(tmp_path / "original", **changes), tmp_path, per_block, said)
    ids = prompt(4, 50)
    want = Loaded(path, ReferenceDevice()).logits(ids)
    logits, meeting, _ = split_logits(path, ids, 2)
    assert meeting.sums == 2 * 2 * 2  # chunks, layers, branches of a layer
    for got in logits:
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)


def matrix(values: Any) -> Stored:
    wide = np.ascontiguousarray(values, np.float32)
    return Stored("F32", *wide.shape, wide.view(np.uint8))


@pytest.mark.parametrize(("name", "shape"), [("fp8", (1, 160)), ("fp8_per_block", (128, 128))])
def test_on_load_each_scale_is_the_largest_magnitude_over_448(name: str, shape: tuple[int, int]) -> None:
    tensor = torch.randn(300, 160, generator=torch.Generator().manual_seed(0))
    _, _, want = rounded(tensor, shape)
    got = quantize(RULES[name], matrix(tensor.numpy()))
    assert got.kind == "F8_E4M3_32"
    np.testing.assert_array_equal(dense(got), want.numpy())


@pytest.mark.parametrize("name", ["fp8", "fp8_per_block"])
def test_on_load_zeros_and_the_smallest_numbers_stay_finite(name: str) -> None:
    values = np.zeros((4, 64), np.float32)
    values[1, 5], values[2, :2] = 1e-45, (1e-40, -3e-43)
    got = dense(quantize(RULES[name], matrix(values)))
    assert np.isfinite(got).all() and not got[0].any() and not got[3].any()
    values[1:3] = 0
    np.testing.assert_array_equal(dense(quantize(RULES[name], matrix(values))), values)


def test_on_load_a_bfloat16_matrix_is_quantized_from_its_values() -> None:
    values = np.random.default_rng(0).standard_normal((32, 64)).astype(ml_dtypes.bfloat16)
    got = quantize(RULES["fp8"], Stored("BF16", 32, 64, values.view(np.uint8)))
    want = quantize(RULES["fp8"], matrix(values.astype(np.float32)))
    np.testing.assert_array_equal(got.data, want.data)


@pytest.mark.parametrize(("name", "convert"), [("fp8", per_channel), ("fp8_per_block", per_block)])
def test_on_load_a_model_equals_its_published_twin(name: str, convert: Any, tmp_path: Path) -> None:
    original = plain(tmp_path / "original", "Qwen2")
    published, _ = twins(original, tmp_path, convert, {"quant_method": "fp8", "weight_block_size": CELL})
    ids = prompt(2, 40)
    want = Loaded(published, make_device("cpu")).logits(ids)
    got = Loaded(original, make_device("cpu"), quantize=lambda m: quantize(RULES[name], m)).logits(ids)
    np.testing.assert_array_equal(got, want)
    built = build(EngineConfig(model=str(original), quantization=name, max_num_seqs=2))
    text = "\n".join(built.info.notes)
    assert "matrices quantized while loading: floats of 8 bits (E4M3)" in text
    assert "activations float32 because the weights are quantized to floats" in text
    built.engine.close()
