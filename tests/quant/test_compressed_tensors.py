"""Checkpoints of compressed-tensors, each module made and read back by that library.

Whole checkpoints that llm-compressor 0.14.0 wrote were read once: W4A16, W8A16, W8A8, GPTQ with actorder "weight", FP8,
FP8_DYNAMIC (of a mixture of experts too), FP8_BLOCK, NVFP4, NVFP4A16 and MXFP4A16. Their values were those that
transformers 5.24 makes of them, which it rounds to bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from octavo.build import build
from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.config import EngineConfig
from octavo.ops.contract import Stored
from octavo.ops.reference import ReferenceDevice
from octavo.quant import dense
from octavo.quant.compressed_tensors import unpack
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.test_split import split_logits
from tests.models.tiny import Loaded, make
from tests.quant.twins import Parts, plain, the_matrix, twins

Weights = dict[str, Any]


def integers(bits: int, strategy: str, **more: Any) -> Weights:
    return {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def floats(bits: int, strategy: str, **more: Any) -> Weights:
    return {**integers(bits, strategy, **more), "type": "float"}


NVFP4 = floats(4, "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn")
MXFP4 = floats(4, "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8")
MXFP8 = floats(8, "group", group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8")

SCHEMES: dict[str, tuple[str, Weights, str]] = {
    # format, weights, what a matrix [96, 128] becomes
    "w4-group32": ("pack-quantized", integers(4, "group", group_size=32), "INT4_32"),
    "w4-group64": ("pack-quantized", integers(4, "group", group_size=64), "INT4_32"),
    "w4-group128": ("pack-quantized", integers(4, "group", group_size=128), "INT4_128"),
    "w4-group32-asym": ("pack-quantized", integers(4, "group", group_size=32, symmetric=False), "INT4_32"),
    "w4-channel": ("pack-quantized", integers(4, "channel"), "INT4_128"),
    "w4-channel-asym": ("pack-quantized", integers(4, "channel", symmetric=False), "INT4_128"),
    "w4-group16": ("pack-quantized", integers(4, "group", group_size=16), "F32"),
    "w8-group32": ("pack-quantized", integers(8, "group", group_size=32), "INT8_32"),
    "w8-channel": ("pack-quantized", integers(8, "channel"), "INT8_128"),
    "w8-channel-asym": ("pack-quantized", integers(8, "channel", symmetric=False), "INT8_128"),
    "w2-group32": ("pack-quantized", integers(2, "group", group_size=32), "INT4_32"),
    "w3-group32-asym": ("pack-quantized", integers(3, "group", group_size=32, symmetric=False), "INT4_32"),
    "w6-channel": ("pack-quantized", integers(6, "channel"), "INT8_128"),
    "w8a8-channel": ("int-quantized", integers(8, "channel"), "INT8_128"),
    "w8a8-tensor": ("int-quantized", integers(8, "tensor"), "INT8_128"),
    "w8a8-channel-asym": ("int-quantized", integers(8, "channel", symmetric=False), "INT8_128"),
    "w8-naive-group32": ("naive-quantized", integers(8, "group", group_size=32), "INT8_32"),
    "w4-naive-channel": ("naive-quantized", integers(4, "channel"), "INT8_128"),
    "fp8-tensor": ("float-quantized", floats(8, "tensor"), "F8_E4M3_32"),
    "fp8-channel": ("float-quantized", floats(8, "channel"), "F8_E4M3_32"),
    "fp8-block": ("float-quantized", floats(8, "block", block_structure=[64, 64]), "F8_E4M3_32"),
    "fp8-naive": ("naive-quantized", floats(8, "channel"), "F8_E4M3_32"),
    "mxfp8": ("mxfp8-quantized", MXFP8, "F8_E4M3_32"),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, "E2M1_16"),
    "mxfp4": ("mxfp4-pack-quantized", MXFP4, "MXFP4"),
}


def grouped(tensor: torch.Tensor, weights: Weights) -> torch.Tensor:
    """[rows of scales, columns of scales, elements that share one]."""
    n_out, n_in = tensor.shape
    if weights["strategy"] == "tensor":
        return tensor.reshape(1, 1, -1)
    if weights["strategy"] == "channel":
        return tensor.reshape(n_out, 1, -1)
    if weights["strategy"] == "block":
        rows, columns = weights["block_structure"]
        wide = torch.nn.functional.pad(tensor, (0, -n_in % columns, 0, -n_out % rows))
        blocks = wide.reshape(-(-n_out // rows), rows, -(-n_in // columns), columns)
        return blocks.transpose(1, 2).flatten(2)
    return tensor.reshape(n_out, -1, weights["group_size"])


def made(tensor: torch.Tensor, name: str, scale: torch.dtype = torch.bfloat16) -> tuple[Parts, torch.Tensor]:
    """A module's tensors as compressed-tensors saves them, and what it reads back from them in float32."""
    form, weights, _ = SCHEMES[name]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    assert scheme.weights is not None
    tensor = tensor.to(scale)
    parts = grouped(tensor, weights)
    state: Parts = {"weight": tensor}
    whole = None
    if name == "nvfp4":
        whole = state["weight_global_scale"] = generate_gparam(tensor.min(), tensor.max())
    by, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights, whole)
    by, zero = (value.reshape(1) if weights["strategy"] == "tensor" else value for value in (by, zero))
    state |= {"weight_scale": by.to(scale) if name != "nvfp4" else by.float(), "weight_zero_point": zero.to(torch.int8)}
    compressor = BaseCompressor.get_value_from_registry(form)
    saved = compressor.compress(state, scheme)
    if name in ("nvfp4", "mxfp4"):
        codes = saved["weight_packed"]
        values = unpack_fp4_from_uint8(codes, len(codes), 2 * codes.shape[1], torch.float32)
        by = saved["weight_scale"].float() if whole is not None else 2.0 ** (saved["weight_scale"].float() - 127)
        read = dequantize(values, by, args=scheme.weights, global_scale=whole, dtype=torch.float32)
    else:
        wide = saved if name == "mxfp8" else {**saved, "weight_scale": saved["weight_scale"].float()}
        read = compressor.decompress(wide, scheme)["weight"]
    return {f".{key}": value for key, value in saved.items()}, read


def config(groups: Mapping[str, Weights], form: str, **more: Any) -> dict[str, Any]:
    """quantization_config as llm-compressor writes it, with a group for each pattern of names."""
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": form,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {
            f"group_{i}": {"targets": [target], "weights": weights, "input_activations": None}
            for i, (target, weights) in enumerate(groups.items())
        },
        **more,
    }


def checkpoint(folder: Path, tensors: Parts, said: dict[str, Any]) -> Path:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": said}))
    return folder


def read(folder: Path, parts: Parts, said: dict[str, Any]) -> Stored:
    """The matrix "m"."""
    return the_matrix(checkpoint(folder, {f"m{ending}": t for ending, t in parts.items()}, said))


def random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) + 0.2


@pytest.mark.parametrize("name", SCHEMES)
def test_values_are_those_of_the_maker(name: str, tmp_path: Path) -> None:
    form, weights, kind = SCHEMES[name]
    parts, want = made(random(96, 128), name)
    more = {".input_scale": torch.ones(1), ".input_zero_point": torch.zeros(1), ".input_global_scale": torch.ones(1)}
    stored = read(tmp_path, parts | more, config({"Linear": weights}, form))
    assert stored.kind == kind
    np.testing.assert_array_equal(dense(stored), want.float().numpy())


@pytest.mark.parametrize("name", ["fp8-block", "w8a8-channel", "w8a8-tensor", "fp8-channel"])
def test_scales_in_float32_round_once(name: str, tmp_path: Path) -> None:
    form, weights, _ = SCHEMES[name]
    parts, want = made(random(100, 160), name, torch.float32)
    stored = read(tmp_path, parts, config({"Linear": weights}, form))
    assert stored.kind != "F32"
    np.testing.assert_array_equal(dense(stored), want.numpy())


@pytest.mark.parametrize("name", ["w4-group32", "w4-channel-asym", "w8-channel-asym"])
def test_scales_in_float32_may_round_the_product_with_a_zero_point(name: str, tmp_path: Path) -> None:
    form, weights, _ = SCHEMES[name]
    parts, want = made(random(96, 128), name, torch.float32)
    got = dense(read(tmp_path, parts, config({"Linear": weights}, form)))
    largest = 2.0 ** weights["num_bits"] * parts[".weight_scale"].max().item()
    np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=largest * 2**-23)


@pytest.mark.parametrize("name", ["w4-channel", "w8-channel-asym", "w6-channel", "w3-group32-asym"])
def test_rows_that_fill_no_words_or_blocks(name: str, tmp_path: Path) -> None:
    form, weights, _ = SCHEMES[name]
    parts, want = made(random(33, 32 if "group" in name else 45), name)
    stored = read(tmp_path, parts, config({"Linear": weights}, form))
    assert stored.kind == ("INT4_32" if "group" in name else "F32")
    np.testing.assert_array_equal(dense(stored), want.float().numpy())


@pytest.mark.parametrize("bits", range(2, 9))
def test_words_hold_what_was_packed(bits: int) -> None:
    values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (5, 71), dtype=torch.int8)
    np.testing.assert_array_equal(unpack(pack_to_int32(values, bits).numpy(), bits, 71), values.numpy())


def test_a_known_word() -> None:
    words = np.array([[0x76543210, -0x01234568]], np.int32)  # the second is 0xfedcba98
    np.testing.assert_array_equal(unpack(words, 4, 16)[0], np.arange(-8, 8))


@pytest.mark.parametrize("symmetric", [True, False])
def test_reordered_columns_are_grouped_by_g_idx(symmetric: bool, tmp_path: Path) -> None:
    """actorder "group": values lie in their order, the scale of column j is that of group g_idx[j]."""
    name = "w4-group32" if symmetric else "w4-group32-asym"
    form, weights, _ = SCHEMES[name]
    parts, want = made(random(96, 128), name)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    signed = torch.from_numpy(unpack(parts[".weight_packed"].numpy(), 4, 128))
    parts[".weight_packed"] = pack_to_int32(signed[:, order], 4)
    parts[".weight_g_idx"] = (order // 32).to(torch.int32)
    said = config({"Linear": {**weights, "actorder": "group"}}, form)
    stored = read(tmp_path, parts, said)
    assert stored.kind == "INT4_32" and stored.columns is not None
    np.testing.assert_array_equal(dense(stored), want.float().numpy()[:, order])
    parts[".weight_g_idx"][0] = (parts[".weight_g_idx"][0] + 1) % 4
    with pytest.raises(CheckpointError, match="weight_g_idx does not put 32 columns into each group"):
        open_checkpoint(checkpoint(tmp_path, {f"m{e}": t for e, t in parts.items()}, said))


@pytest.mark.parametrize("fill", [-1, None])
def test_g_idx_in_order_moves_nothing(fill: int | None, tmp_path: Path) -> None:
    form, weights, _ = SCHEMES["w4-group32"]
    parts, want = made(random(96, 128), "w4-group32")
    g_idx = torch.arange(128) // 32 if fill is None else torch.full((128,), fill)
    stored = read(tmp_path, parts | {".weight_g_idx": g_idx.to(torch.int32)}, config({"Linear": weights}, form))
    assert stored.columns is None
    np.testing.assert_array_equal(dense(stored), want.float().numpy())


def test_groups_are_found_by_name_then_pattern_then_class(tmp_path: Path) -> None:
    names = {
        "a.embed_tokens": "w8-channel-asym",
        "a.q_proj": "w4-group32",
        "a.gate_proj": "w8-group32",
        "a.down_proj": "fp8-channel",
        "b.up_proj": "w4-channel",
    }
    tensors, want = {}, {}
    for module, name in names.items():
        parts, want[module] = made(random(64, 128), name)
        tensors |= {module + ending: part for ending, part in parts.items()}
    targets = {
        "lm_head": SCHEMES["fp8-tensor"][1],
        "Embedding": SCHEMES["w8-channel-asym"][1],
        "Linear": SCHEMES["w8-group32"][1],
        "re:.*(q|up)_proj": SCHEMES["w4-group32"][1],
        "a.down_proj": SCHEMES["fp8-channel"][1],
        "b.up_proj": SCHEMES["w4-channel"][1],
    }
    said = config(targets, "mixed-precision")
    with open_checkpoint(checkpoint(tmp_path, tensors, said)) as opened:
        for module in names:
            np.testing.assert_array_equal(dense(opened.stored(f"{module}.weight")), want[module].float().numpy())


PACKED, _ = made(random(32, 64), "w4-group32")


CHANNEL = integers(4, "channel")
ROWS = torch.ones(4, 1)


@pytest.mark.parametrize(
    ("parts", "weights", "more", "message"),
    [
        ({}, integers(1, "channel"), {}, "has 'int' of 1 bits; int of 2 to 8 and float of 4 and 8 can be read"),
        ({}, floats(6, "group", group_size=32), {}, "has 'float' of 6 bits"),
        ({}, integers(4, "token"), {}, "strategy is 'token'; tensor, channel, group"),
        ({}, integers(4, "group"), {}, "group_size is None; a number of columns is needed"),
        ({}, CHANNEL, {"format": "marlin-24"}, "format is 'marlin-24'; pack-quantized, int-quantized"),
        ({}, CHANNEL, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "matrices that are not sparse"),
        ({}, CHANNEL, {"transform_config": {"config_groups": {"u": {}}}}, "weights that are not rotated"),
        ({}, CHANNEL, {"config_groups": None}, "config_groups is None; an object of groups is needed"),
        ({}, CHANNEL, {"config_groups": {"a": {"targets": ["re:("]}}}, r"config_groups.a.targets has 're:\('"),
        (PACKED, integers(8, "group", group_size=32), {}, "the group says int of 8 bits, which 16 words hold"),
        (PACKED, integers(4, "group", group_size=16), {}, r"scales \[32, 2\]; one, one per row or one per block"),
        (PACKED, integers(4, "group", group_size=32, symmetric=False), {}, "it has no weight_zero_point"),
        ({".weight": torch.ones(4, 32), ".weight_scale": ROWS}, CHANNEL, {}, "weight has the type F32; I8 or"),
        (
            {".weight_packed": torch.ones(4, 32, dtype=torch.uint8), ".weight_scale": ROWS},
            CHANNEL,
            {},
            "weight_packed is U8, which holds floats of 4 bits",
        ),
        ({".weight_scale": ROWS}, CHANNEL, {}, "neither weight nor weight_packed"),
    ],
)
def test_what_cannot_be_read_is_refused(
    parts: Parts, weights: Weights, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    said = config({"Linear": weights}, "pack-quantized") | more
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(checkpoint(tmp_path, {f"m{e}": t for e, t in parts.items()}, said))


def test_a_module_that_no_group_targets_is_refused(tmp_path: Path) -> None:
    said = config({"re:.*attn.*": integers(4, "group", group_size=32)}, "pack-quantized")
    with pytest.raises(CheckpointError, match="'m' cannot be read as compressed-tensors: no group of config_groups"):
        open_checkpoint(checkpoint(tmp_path, {f"m{e}": t for e, t in PACKED.items()}, said))


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 32}

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "w4a16-biased": ("Qwen2", {}, "w4-group32-asym"),
    "w4a16-experts": ("Qwen3Moe", MOE, "w4-group64"),
    "w8a8": ("Llama", {}, "w8a8-channel"),
    "fp8": ("Llama", {}, "fp8-channel"),
    "nvfp4": ("Llama", {}, "nvfp4"),
    "mxfp4": ("Llama", {}, "mxfp4"),
}

FORMS = {
    "w4a16-biased": "int8",
    "w4a16-experts": "int8",
    "w8a8": "int16",
    "fp8": "float32",
    "nvfp4": "int8",
    "mxfp4": "int8",
}
"""Of activations, where none is asked for."""


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(name, published, dequantized)."""
    family, changes, name = MODELS[request.param]
    form, weights, _ = SCHEMES[name]
    folder = tmp_path_factory.mktemp(request.param)
    original = plain(folder / "original", family, **changes)
    return request.param, *twins(original, folder, lambda t: made(t, name), config({"Linear": weights}, form))


@pytest.mark.parametrize("device", NAMES)
def test_models_equal_their_dequantized_values(device: str, pair: tuple[str, Path, Path]) -> None:
    """Products of the CPU add the elements of a block before they are scaled: float32 rounds elsewhere."""
    ids = prompt(3, 60)
    got, want = (Loaded(path, make_device(device)).logits(ids, [17]) for path in pair[1:])
    bound = 5e-6 * np.abs(want).max() if device == "cpu" else 0
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize(("activations", "bound"), [("int16", 2e-4), ("int8", 0.04)])
def test_rounded_activations_stay_near(activations: str, bound: float, pair: tuple[str, Path, Path]) -> None:
    """A product's inputs are rounded by about 1/40,000 (of 16 bits) or 1/200 of their size; nine follow one another,
    and attention and gates multiply errors a few times. The median over tokens: a router may choose another expert."""
    ids = prompt(3, 60)
    got, want = (Loaded(path, make_device("cpu", activations=activations)).logits(ids) for path in pair[1:])
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(error) <= bound


def test_start_up_says_what_it_is(pair: tuple[str, Path, Path]) -> None:
    built = build(EngineConfig(model=str(pair[1]), quantization="compressed-tensors", max_num_seqs=2))
    text = "\n".join(built.info.notes)
    assert SCHEMES[MODELS[pair[0]][2]][2][:4] in text and f"activations {FORMS[pair[0]]} because" in text
    built.engine.close()


@pytest.mark.parametrize(("variant", "in_turns"), [("llama4", False), ("gpt-oss", True)])
def test_experts_of_stacks_are_published_one_by_one(variant: str, in_turns: bool, tmp_path: Path) -> None:
    """As llm-compressor does: [n_in, n_out] of each is turned, rows of gate and up are taken apart."""
    original, _ = make(variant, tmp_path)
    published: Parts = {}
    values = load_file(original / "model.safetensors")

    def publish(name: str, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts, read = made(matrix, "fp8-channel")
        published.update({name + ending: part for ending, part in parts.items()})
        if bias is not None:
            published[f"{name}.bias"] = bias.contiguous()
        return read.float()

    for name, stack in list(values.items()):
        biases = values.get(f"{name}_bias")
        if name.endswith("experts.gate_up_proj"):
            n = stack.shape[2] // 2
            gate, up = (slice(0, None, 2), slice(1, None, 2)) if in_turns else (slice(0, n), slice(n, None))
            for e, turned in enumerate(stack.transpose(1, 2)):
                for word, rows in (("gate", gate), ("up", up)):
                    stem = name.replace("gate_up_proj", f"{e}.{word}_proj")
                    bias = biases[e, rows] if biases is not None else None
                    stack[e, :, rows] = publish(stem, turned[rows], bias).T
        elif name.endswith("experts.down_proj"):
            for e, turned in enumerate(stack.transpose(1, 2)):
                bias = biases[e] if biases is not None else None
                stack[e] = publish(name.replace("down_proj", f"{e}.down_proj"), turned, bias).T
        elif not name.endswith("_proj_bias"):
            published[name] = stack
    assert len(published) > len(values)
    (tmp_path / "published").mkdir()
    save_file({name: t.contiguous() for name, t in published.items()}, tmp_path / "published" / "model.safetensors")
    save_file(values, original / "model.safetensors")
    settings = json.loads((original / "config.json").read_text())
    said = config({"Linear": SCHEMES["fp8-channel"][1]}, "float-quantized")
    (tmp_path / "published" / "config.json").write_text(json.dumps(settings | {"quantization_config": said}))
    ids = prompt(5, 50)
    got, want = (Loaded(path, ReferenceDevice()).logits(ids) for path in (tmp_path / "published", original))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["w4-group32", "w4-group32-asym", "w8a8-channel", "fp8-channel", "nvfp4", "mxfp4"])
def test_two_ranks_divide_rows_and_columns(name: str, tmp_path: Path) -> None:
    form, weights, _ = SCHEMES[name]
    original = plain(tmp_path / "original", intermediate_size=256, hidden_size=256)
    path, _ = twins(original, tmp_path, lambda t: made(t, name), config({"Linear": weights}, form))
    ids = prompt(4, 50)
    want = Loaded(path, ReferenceDevice()).logits(ids)
    logits, meeting, _ = split_logits(path, ids, 2)
    assert meeting.sums == 2 * 2 * 2  # chunks, layers, branches of a layer
    for got in logits:
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
