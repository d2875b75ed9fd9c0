"""GPT-2, whose floats are stored for x @ W, in the files of GPTQ and bitsandbytes, which turn them first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.tiny import Loaded
from tests.quant import packing

LAYERS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def gptq(weight: Any) -> tuple[Any, dict[str, Any]]:
    matrix = packing.rounded(weight, 4, packing.consecutive(weight.shape[1], 32))
    return matrix.values, {f".{name}": part for name, part in packing.gptq(matrix).items()}


def int8(weight: Any) -> tuple[Any, dict[str, Any]]:
    """As bitsandbytes: values are SCB / 127 times integers."""
    largest = np.abs(weight).max(1).astype(np.float32)
    d = (largest / np.float32(127))[:, None]
    q = np.round(weight / d).astype(np.int8)
    return d * q, {".weight": q, ".SCB": largest}


WAYS = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "bitsandbytes": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize("method", WAYS)
def test_logits_are_those_of_the_values(method: str, device: str, tmp_path: Path) -> None:
    """The output of attention is a square matrix, of which no shape says which way it lies."""
    import torch
    import transformers

    config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, n_positions=512, vocab_size=199, n_inner=128)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval().float()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(tmp_path / "original")
    quantize, said = WAYS[method]
    quantized: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, tensor in load_file(tmp_path / "original" / "model.safetensors").items():
        if name.endswith(LAYERS):
            value, parts = quantize(np.ascontiguousarray(tensor.T))
            values[name] = np.ascontiguousarray(value.T)
            quantized |= {name.removesuffix(".weight") + e: np.ascontiguousarray(part) for e, part in parts.items()}
        else:
            quantized[name] = values[name] = tensor
    settings = json.loads((tmp_path / "original" / "config.json").read_text())
    for folder, tensors, more in (("quantized", quantized, {"quantization_config": said}), ("plain", values, {})):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps(settings | more))
    loaded = [Loaded(tmp_path / folder, make_device(device)) for folder in ("quantized", "plain")]
    got, want = (one.logits(prompt(3, 40), [17]) for one in loaded)
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
