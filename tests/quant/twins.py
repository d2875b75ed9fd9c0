"""Pairs of tiny checkpoints: one quantized, one with the values that this stands for, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from octavo.checkpoint import open_checkpoint
from octavo.ops.contract import Stored
from tests.models.tiny import COMMON

Parts = dict[str, torch.Tensor]
"""Tensors of a module by the ending of their name."""


def plain(folder: Path, family: str = "Llama", **changes: Any) -> Path:
    """A random checkpoint in float32 whose matrices fill blocks of 32 and can be divided by two."""
    import transformers

    wide = {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
    }
    config = getattr(transformers, family + "Config")(**(COMMON | wide | changes))
    torch.manual_seed(0)
    model = getattr(transformers, family + "ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(folder)
    return folder


def twins(
    original: Path,
    folder: Path,
    quantize: Callable[[torch.Tensor], tuple[Parts, torch.Tensor]],
    said: dict[str, Any],
    also: tuple[str, ...] = (),
) -> tuple[Path, Path]:
    """(quantized, plain) of a checkpoint in float32: `quantize` makes the tensors of every projection, and of what ends
    in one of `also`, and says what they stand for; `said` is quantization_config."""
    quantized: Parts = {}
    values: Parts = {}
    for name, tensor in load_file(original / "model.safetensors").items():
        if name.endswith(("_proj.weight", *also)):
            parts, values[name] = quantize(tensor)
            values[name] = values[name].float().contiguous()
            assert values[name].shape == tensor.shape
            quantized |= {name.removesuffix(".weight") + ending: part.contiguous() for ending, part in parts.items()}
        else:
            quantized[name] = values[name] = tensor
    config = json.loads((original / "config.json").read_text())
    for path, tensors, more in (
        (folder / "quantized", quantized, {"quantization_config": said}),
        (folder / "plain", values, {}),
    ):
        path.mkdir(parents=True)
        save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(config | more))
    return folder / "quantized", folder / "plain"


def the_matrix(folder: Path) -> Stored:
    """ "m" of a checkpoint whose tensors make that matrix and nothing else, as its header says it."""
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.names() == {"m.weight"}
        stored = checkpoint.stored("m.weight")
        assert (checkpoint.kind("m.weight"), *checkpoint.shape("m.weight")) == stored[:3]
    return stored
