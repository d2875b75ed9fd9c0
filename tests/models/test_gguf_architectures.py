"""GGUF files of every family, written by llama.cpp's own converter from the tiny checkpoints, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.devices import make_device
from tests.models.converter import Converter
from tests.models.test_parity import PROMPTS, Checkpoints, prompt
from tests.models.tiny import VARIANTS, Loaded

_WINDOW = "files of this family say no window"
_HUNYUAN = "the converter knows the lengths of the released models only"
_BAICHUAN = "files of baichuan have a normalized head by their vocabulary, ALiBi by their number of layers"
_ROPE = "the converter leaves out how RoPE is scaled"

INEXPRESSIBLE = {
    "apertus-bias-relu2": "files do not say the activation; an apertus has xIELU",
    "baichuan-13b": _BAICHUAN,
    "baichuan2": _BAICHUAN,
    "baichuan2-13b": _BAICHUAN,
    "ernie-moe-some-layers": "files do not say moe_norm_min",
    "hunyuan-moe-layers": "files say one number of experts for all layers",
    "hunyuan-moe-published": _HUNYUAN,
    "ministral3-window": _WINDOW,
    "mixtral-window": _WINDOW,
    "nemotron-biases": "files of nemotron say a part of the head rotates where it is not hidden size / heads wide",
    "olmo-bias": "the converter puts the rows of q and k in another order, but not their biases",
    "olmoe-clipped": "files of olmoe say no clipping",
    "phimoe": "files do not say the router's jitter",
    "phimoe-published": "files do not say the router's jitter",
    "qwen2-moe-some-layers": "the converter does not know layers without experts",
    "qwen3-moe-some-layers": "the converter does not know layers without experts",
    "exaone-tied-bias": "files of exaone say a part of the head rotates where it is not hidden size / heads wide",
    "gemma3": "files of gemma3 say no other period of windows than 6",
    "llama-rope-dynamic-stretched": _ROPE,
    "llama-rope-long": _ROPE,
    "llama-rope-long-factor": _ROPE,
    "llama-rope-long-short": _ROPE,
    "llama-rope-yarn-mscale": _ROPE,
    "llama-rope-yarn-untruncated": _ROPE,
    "llama-mqa": "files do not say the activation; a llama's is SiLU",
    "mistral-window": _WINDOW,
    "qwen2-window": _WINDOW,
    "smollm3-window": "files of smollm3 say no window and no other interval of layers that do not rotate than 4",
    "hunyuan": _HUNYUAN,
    "hunyuan-release": _HUNYUAN,
    "internlm2-bias": "the converter cannot reshape the biases",
}
"""Variants whose model a GGUF file cannot say, and why; so llama.cpp cannot run them either."""

FAMILIES = (
    "Apertus Arcee Ernie4_5 Ernie4_5_Moe Exaone Exaone4 Gemma3 Glm4Moe Granite GraniteMoe GraniteMoeShared "
    "HunYuanDenseV1 HunYuanMoEV1 InternLM3 Llama Ministral3 Mistral Mixtral Nemotron Olmo Olmo2 Olmo3 Olmoe Phimoe "
    "Qwen2 Qwen2Moe Qwen3 Qwen3Moe SeedOss SmolLM3"
)
"""Families of variants whose files are read."""

CONVERTED = [
    name for name, variant in VARIANTS.items() if variant.family in FAMILIES.split() and name not in INEXPRESSIBLE
]

SAID: dict[str, dict[str, Any]] = {
    "Ernie4_5_MoEForCausalLM": {"architectures": ["Ernie4_5_MoeForCausalLM"]},
    "ExaoneForCausalLM": {"activation_function": "silu"},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": [32] * 3, "moe_topk": [3] * 3, "num_shared_expert": [1] * 3},
    "PhimoeForCausalLM": {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 512},
    "PhiMoEForCausalLM": {"original_max_position_embeddings": 512},
}
"""By architecture, keys of published config.json files that the converter wants and does not get from transformers."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def converter() -> Iterator[Converter]:
    with Converter() as running:
        yield running


def convert(converter: Converter, folder: Path, file: Path, kind: str = "f32") -> Path:
    """The file of a folder, to which comes a vocabulary: one converter looks at its size."""
    config = json.loads((folder / "config.json").read_text())
    vocabulary = {f"<{i}>": i for i in range(config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return converter(folder, file, SAID.get(config["architectures"][0], {}), kind)


def test_the_list_of_exceptions_names_variants() -> None:
    assert INEXPRESSIBLE.keys() < VARIANTS.keys()


@pytest.mark.parametrize("variant", CONVERTED)
def test_logits_of_a_file_equal_transformers(variant: str, checkpoints, converter, tmp_path: Path) -> None:
    folder, oracle = checkpoints[variant]
    loaded = Loaded(convert(converter, folder, tmp_path / "m.gguf"), make_device("reference"))
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        with torch.no_grad():
            want = oracle(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(loaded.logits(ids), want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", CONVERTED)
def test_quantized_matrices_lie_where_plain_ones_do(variant: str, checkpoints, converter, tmp_path: Path) -> None:
    """A file of Q8_0 matrices on the native device gives the logits of the same values on the reference."""
    file = convert(converter, checkpoints[variant][0], tmp_path / "m.gguf", "q8_0")
    ids = prompt(1, 40)
    want = Loaded(file, make_device("reference")).logits(ids)
    np.testing.assert_allclose(Loaded(file, make_device("cpu")).logits(ids), want, rtol=0, atol=5e-4)
