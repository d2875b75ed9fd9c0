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

INEXPRESSIBLE = {
    "exaone-tied-bias": "files of exaone say a part of the head rotates where it is not hidden size / heads wide",
    "gemma3": "files of gemma3 say no other period of windows than 6",
    "llama-mqa": "files do not say the activation; a llama's is SiLU",
    "mistral-window": "files of llama say no window",
    "qwen2-window": "files of qwen2 say no window",
    "smollm3-window": "files of smollm3 say no window and no other interval of layers that do not rotate than 4",
    "hunyuan": "the converter knows the lengths of the two released models only",
    "hunyuan-release": "the converter knows the lengths of the two released models only",
    "internlm2-bias": "the converter cannot reshape the biases",
}
"""Variants whose model a GGUF file cannot say, and why; so llama.cpp cannot run them either."""

FAMILIES = "Arcee Ernie4_5 Exaone Gemma3 Granite HunYuanDenseV1 InternLM3 Llama Mistral Qwen2 Qwen3 SeedOss SmolLM3"
"""Families of variants whose files are read."""

CONVERTED = [
    name for name, variant in VARIANTS.items() if variant.family in FAMILIES.split() and name not in INEXPRESSIBLE
]

SAID: dict[str, dict[str, Any]] = {
    "ExaoneForCausalLM": {"activation_function": "silu"},
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
