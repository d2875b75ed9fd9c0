"""Scales for an FP8 KV cache in checkpoints: found under every maker's names, and used as transformers' attention would
over keys and values that were rounded to FP8 and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.build import build
from octavo.checkpoint.cache_scales import split
from octavo.config import ConfigError, EngineConfig
from tests.devices import make_device
from tests.models.test_parity import prompt
from tests.models.tiny import Loaded
from tests.quant.twins import plain

Scales = dict[str, list[float]]
"""Of a layer: "k" and "v" to one scale, or one for each KV head."""

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
IDS = prompt(4, 40)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(tmp_path_factory.mktemp("original"))


def with_scales(original: Path, folder: Path, layers: list[dict[str, Any]], **said: Any) -> Path:
    """The checkpoint as compressed-tensors leaves it when it quantizes the cache alone: `layers` gives the names and
    values of the scales of each layer."""
    shutil.copytree(original, folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, scales in enumerate(layers):
        for name, value in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        **said,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def truth(original: Path, dtype: torch.dtype, layers: list[Scales]) -> Any:
    """Logits of transformers with keys and values that are rounded to `dtype`, divided by the scales."""

    def rounded(x: torch.Tensor, scales: list[float]) -> torch.Tensor:
        largest = torch.finfo(dtype).max
        divisor = torch.tensor(scales)[:, None, None]
        return (x / divisor).clamp(-largest, largest).to(dtype).float() * divisor

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
        own = layers[module.layer_idx]
        k, v = rounded(k, own["k"]), rounded(v, own["v"])
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("rounded", attention)
    model = transformers.AutoModelForCausalLM.from_pretrained(original, attn_implementation="rounded").float().eval()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


def assert_close(got: Any, want: Any) -> None:
    """Logits of most tokens to 2e-5. A key or value between two numbers of FP8 may be rounded to the other one, as
    sums are taken in another order: tokens that read it differ a little more, much less than with other scales."""
    errors = np.abs(got - want).max(-1) / np.abs(want).max()
    assert np.median(errors) < 2e-5
    assert errors.max() < 5e-4


K, V = [0.02, 0.05], [0.004, 0.009]
"""Of two layers: about the largest magnitude / 448, and much more."""


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("kept", ["v", "k", "kv", ""])
def test_quant_08_scales_of_an_fp8_cache_are_used(
    original: Path, tmp_path: Path, kept: str, dtype: str, device: str
) -> None:
    """Those that are there; for both where only keys or only values have one; else 1."""
    there = [{f"{one}_scale": [{"k": K, "v": V}[one][layer]] for one in kept} for layer in range(2)]
    path = with_scales(original, tmp_path / "model", there, kv_cache_scheme=SCHEME)
    used: list[Scales] = []
    for layer in range(2):
        k, v = ([K[layer]] if "k" in kept else None), ([V[layer]] if "v" in kept else None)
        used.append({"k": k or v or [1.0], "v": v or k or [1.0]})
    got = Loaded(path, make_device(device), kv_dtype=dtype).logits(IDS)
    kind = torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.float8_e5m2
    assert_close(got, truth(original, kind, used))
    if kept:
        other = Loaded(original, make_device(device), kv_dtype=dtype).logits(IDS)
        assert np.abs(got - other).max() > 1e-3 * np.abs(got).max()


@pytest.mark.parametrize("device", ["cpu", "reference", "torch"])
def test_a_scale_for_each_head(original: Path, tmp_path: Path, device: str) -> None:
    k, v = [0.5, 0.02], [0.003, 0.7]
    path = with_scales(original, tmp_path / "model", [{"k_scale": [[[s]] for s in k], "v_scale": v}] * 2)
    got = Loaded(path, make_device(device), kv_dtype="fp8_e4m3").logits(IDS)
    assert_close(got, truth(original, torch.float8_e4m3fn, [{"k": k, "v": v}] * 2))


@pytest.mark.parametrize(
    ("names", "k", "v"),
    [
        ({"k_scale": 0.1, "v_scale": 0.2}, 0.1, 0.2),
        ({"k_scale": [0.1], "v_scale": [0.2], "k_proj.k_scale": [0.3], "v_proj.v_scale": [0.4]}, 0.1, 0.2),
        ({"k_proj.k_scale": 0.1, "v_proj.v_scale": 0.2, "q_scale": 0.5, "prob_scale": 0.5}, 0.1, 0.2),
        ({"attn.k_scale": 0.1, "attn.v_scale": 0.2, "k_zero_point": 0.0, "v_zero_point": 0.0}, 0.1, 0.2),
        ({"k_proj.output_scale": 0.1, "v_proj.output_scale": 0.2, "q_proj.output_scale": 0.5}, 0.1, 0.2),
        ({"kv_scale": 0.3}, 0.3, 0.3),
        ({"kv_scale": 0.3, "v_scale": 0.2}, 0.3, 0.2),
        ({"qkv_proj.k_scale": 0.1}, 0.1, None),
    ],
)
def test_names_of_every_maker(original: Path, tmp_path: Path, names: dict[str, Any], k: float, v: float | None) -> None:
    from octavo.checkpoint import open_checkpoint

    path = with_scales(original, tmp_path / "model", [names, names])
    with open_checkpoint(path) as checkpoint:
        for layer in range(2):
            for one, want in (("k", k), ("v", v)):
                got = checkpoint.cache.of(layer, one)
                assert got is None if want is None else got is not None and got.tolist() == [np.float32(want)]
        assert checkpoint.cache.of(2, "k") is None
    Loaded(path, make_device("cpu"))  # no tensor is left over


def notes(path: Path, **options: Any) -> str:
    built = build(EngineConfig(model=str(path), max_num_seqs=2, **options))
    built.engine.close()
    return "\n".join(built.info.notes)


def test_quant_08_start_up_says_what_it_does_with_scales(original: Path, tmp_path: Path) -> None:
    both = {"k_scale": 0.1, "v_scale": 0.2}
    wanted = with_scales(original, tmp_path / "wanted", [both, both], kv_cache_scheme=SCHEME)
    one = with_scales(original, tmp_path / "one", [both, {}])
    none = with_scales(original, tmp_path / "none", [{}, {}], kv_cache_scheme=SCHEME)
    said = notes(wanted)
    assert "in fp8_e4m3 because the checkpoint says FP8" in said
    assert "scales of the KV cache from the checkpoint for 2 of 2 layers" in said
    assert "are not used" in notes(wanted, kv_cache_dtype="float16")
    assert "in float32 because of --dtype float32" in notes(wanted, dtype="float32")
    assert "in float16: " in notes(one) and "are not used" in notes(one)
    said = notes(one, kv_cache_dtype="fp8")
    assert "for 1 of 2 layers" in said and "1 layers have no scales" in said
    assert "all layers have no scales of the KV cache" in notes(none)
    assert "scales" not in notes(original)


@pytest.mark.parametrize("wrong", [0.0, -1.0, 1e-35, 1e35, float("inf"), float("nan")])
def test_a_scale_that_is_no_number_to_divide_by_is_told(original: Path, tmp_path: Path, wrong: float) -> None:
    layers: list[dict[str, Any]] = [{"k_scale": 0.1, "v_scale": 0.2}, {"k_scale": 0.1, "v_scale": [0.3, wrong]}]
    path = with_scales(original, tmp_path / "model", layers)
    with pytest.raises(ConfigError) as told:
        notes(path, kv_cache_dtype="fp8")
    assert f"layer 1 in the checkpoint is {np.float32(wrong)}, which is no positive number" in str(told.value)
    assert "choose --kv-cache-dtype float16" in str(told.value)
    assert "are not used" in notes(path, kv_cache_dtype="float16")


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"kv_cache_scheme": SCHEME | {"type": "int"}}, "int of 8 bits"),
        ({"kv_cache_scheme": SCHEME | {"symmetric": False}}, "asymmetric float of 8 bits"),
        ({"kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
    ],
)
def test_start_up_says_that_a_cache_of_another_kind_is_not_made(
    original: Path, tmp_path: Path, said: dict[str, Any], words: str
) -> None:
    path = with_scales(original, tmp_path / "model", [{"k_scale": 0.1, "v_scale": 0.2}] * 2, **said)
    for dtype in ("float16", "fp8_e4m3"):
        told = notes(path, kv_cache_dtype=dtype)
        assert f"made for a KV cache of {words}, which Octavo has none of: it is kept in {dtype}" in told
        assert "from the checkpoint" not in told


@pytest.mark.parametrize(
    ("said", "wanted", "found"),
    [
        ({"kv_cache_scheme": SCHEME}, True, True),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True, True),
        ({"kv_cache_scheme": None}, False, True),
        ({"kv_cache_scheme": "static"}, False, True),
        ({"kv_cache_scheme": SCHEME | {"type": "int"}}, False, False),
        ({"kv_cache_scheme": SCHEME | {"symmetric": False}}, False, False),
        ({"kv_cache_quant_algo": "FP8"}, True, True),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, True, True),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}, False, True),
        ({"quantization": {"kv_cache_quant_algo": "NVFP4"}}, False, False),
    ],
)
def test_configs_that_want_an_fp8_cache(said: dict[str, Any], wanted: bool, found: bool) -> None:
    from octavo.checkpoint.tensor import Tensor

    scale = Tensor("F32", (1,), np.array([0.5], np.float32).view(np.uint8), Path("a"))
    tensors = {"model.layers.0.self_attn.k_scale": scale, "model.norm.weight": scale}
    rest, cache = split({"quantization_config": {"quant_method": "x", **said}}, tensors)
    assert list(rest) == ["model.norm.weight"]
    assert (cache.wanted, cache.of(0, "k") is not None) == (wanted, found)
    assert split({}, tensors)[0] == tensors  # nothing is quantized: no name means anything


@pytest.mark.parametrize(
    ("scale", "word"),
    [([0.1, 0.2, 0.3], "3 scales of an FP8 KV cache for 2 KV heads"), ([0.0], "is 0.0"), ([float("nan")], "is nan")],
)
def test_scales_that_make_no_sense_are_refused(original: Path, tmp_path: Path, scale: list[float], word: str) -> None:
    path = with_scales(original, tmp_path / "model", [{"k_scale": scale}, {}], kv_cache_scheme=SCHEME)
    with pytest.raises(ConfigError, match=word):
        build(EngineConfig(model=str(path)))
    assert "are not used" in notes(path, kv_cache_dtype="float16")
