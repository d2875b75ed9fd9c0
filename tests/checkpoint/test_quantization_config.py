"""Where a checkpoint says how it is quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.quant import dense
from tests.quant import packing

GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "model_file_base_name": "model"}
AWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
MATRIX = packing.rounded(
    np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32), 4, packing.consecutive(64, 32)
)


def write(folder: Path, method: str, config: dict[str, Any], **files: dict[str, Any]) -> Path:
    parts = packing.gptq(MATRIX) if method == "gptq" else packing.awq(MATRIX)
    tensors = {f"a.{name}": np.asarray(t, order="C") for name, t in parts.items()}
    save_file(tensors | {"b.weight": np.ones(4, np.float32)}, folder / "model.safetensors")
    for name, content in ({"config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("method", "config", "files"),
    [
        ("gptq", {"quantization_config": {"quant_method": "gptq", **GPTQ}}, {}),
        ("gptq", {"text_config": {"quantization_config": {"quant_method": "gptq", **GPTQ}}}, {}),
        ("gptq", {}, {"quantize_config": GPTQ}),
        ("gptq", {"quantization_config": None}, {"quantize_config": {"quant_method": "gptq", **GPTQ}}),
        ("gptq", {"quantization_config": {"quant_method": "gptq", **GPTQ}}, {"quantize_config": {"bits": 5}}),
        ("awq", {"quantization_config": {"quant_method": "awq", **AWQ}}, {}),
        ("awq", {}, {"quant_config": AWQ}),
    ],
)
def test_the_places(method: str, config: dict[str, Any], files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, method, config, **files)) as checkpoint:
        assert checkpoint.config["quantization_config"]["quant_method"] == method
        assert checkpoint.names() == {"a.weight", "b.weight"}
        assert (checkpoint.kind("a.weight"), checkpoint.shape("a.weight")) == ("INT4_32", (16, 64))
        assert np.array_equal(dense(checkpoint.stored("a.weight")), MATRIX.values)


def test_without_a_word_the_tensors_are_what_they_are(tmp_path: Path) -> None:
    with open_checkpoint(write(tmp_path, "gptq", {})) as checkpoint:
        assert "a.qweight" in checkpoint.names() and "quantization_config" not in checkpoint.config


def test_what_cannot_be_read_names_file_module_and_cause(tmp_path: Path) -> None:
    folder = write(tmp_path, "gptq", {}, quantize_config={**GPTQ, "bits": 6})
    with pytest.raises(CheckpointError, match="quantization_config of the method 'gptq': bits is 6"):
        open_checkpoint(folder)
    folder = write(tmp_path, "awq", {}, quantize_config=GPTQ)
    with pytest.raises(CheckpointError, match="model.safetensors: 'a' cannot be read as gptq: scales is"):
        open_checkpoint(folder)
