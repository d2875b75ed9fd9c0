"""Tiny checkpoints in a quantization method's files, and beside each the same model in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models.tiny import COMMON

LINEAR = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""What the names of layers that are quantized end in."""

Way = Callable[[str, Any], tuple[Any, dict[str, Any]] | None]
"""From a module's name and its float32 weight [n_out, n_in] to the values that are left of it and the tensors that
stand for them, by ending; None: it stays as it is."""


def pair(source: Path, folder: Path, way: Way, **config: Any) -> tuple[Path, Path]:
    """(quantized, the same in float32), of a checkpoint in float32. `config` is quantization_config."""
    paths = folder / "quantized", folder / "plain"
    tensors = load_file(source / "model.safetensors")
    quantized, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith((*LINEAR, "lm_head.weight")) and (found := way(module, weight)) is not None:
            plain[name], parts = found
            del quantized[name]
            quantized |= {f"{module}.{ending}": np.asarray(t, order="C") for ending, t in parts.items()}
    assert len(quantized) > len(tensors)
    said = json.loads((source / "config.json").read_text())
    for path, content, extra in zip(paths, (quantized, plain), ({"quantization_config": config}, {}), strict=True):
        path.mkdir()
        save_file(content, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(said | extra))
    return paths


def wide(folder: Path, family: str = "Qwen2", **changes: Any) -> Path:
    """A model whose matrices have 128 and 256 columns; Qwen2's q, k and v have biases."""
    import torch
    import transformers

    size = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "initializer_range": 0.2}
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **size, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(folder / family)
    return folder / family
