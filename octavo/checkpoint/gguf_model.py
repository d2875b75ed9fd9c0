"""A GGUF file as a checkpoint: Hugging Face names, order of rows and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.gguf import read_gguf
from octavo.checkpoint.gguf_config import family_of, generation, translate
from octavo.checkpoint.gguf_metadata import Metadata
from octavo.checkpoint.tensor import Tensor
from octavo.ops.contract import Stored
from octavo.quant import dense

_ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path) -> Checkpoint:
    """Read the metadata and the tensor table of a .gguf file. Raises CheckpointError."""
    metadata, own = read_gguf(path)
    meta = Metadata(path, metadata, {name: tensor.shape for name, tensor in own.items()})
    family = family_of(meta)
    config = translate(meta, family)
    factors = own.pop(_ROPE_FACTORS, None)
    if factors is not None:
        config["rope_freq_factors"] = _factors(path, factors, config)
    tensors: dict[str, Tensor] = {}
    for name, tensor in own.items():
        translated = family.names.hugging_face(name)
        if translated in tensors:
            raise CheckpointError(
                f"{path} has two tensors for {translated!r}, one of them {name!r}. Convert the model again."
            )
        tensors[translated] = _mark_paired(path, name, tensor, config) if family.paired else tensor
    return Checkpoint(path, "gguf", config, generation(metadata), tensors, metadata)


def _factors(path: Path, tensor: Tensor, config: dict[str, Any]) -> list[float]:
    """Llama 3's context extension as the file has it: what divides each of the d/2 rotary frequencies."""
    expected = int(config["head_dim"] * config.get("partial_rotary_factor", 1)) // 2
    if tensor.shape != (expected,):
        raise CheckpointError(
            f"{path}: {_ROPE_FACTORS!r} has the shape {list(tensor.shape)} where [{expected}] was "
            f"expected. Convert the model again."
        )
    factors = dense(Stored(tensor.kind, 1, expected, tensor.data.reshape(1, -1)))[0]
    if not (factors > 0).all():
        raise CheckpointError(f"{path}: {_ROPE_FACTORS!r} must hold positive numbers. Convert the model again.")
    return [float(f) for f in factors]


def _mark_paired(path: Path, name: str, tensor: Tensor, config: dict[str, Any]) -> Tensor:
    """Say of q and k that rotary pairs are neighbours in their rows."""
    if ".attn_q." in name:
        heads = config["num_attention_heads"]
    elif ".attn_k." in name:
        heads = config["num_key_value_heads"]
    else:
        return tensor
    if not heads or tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{path}: {name!r} has {tensor.shape[0]} rows, which {heads} heads cannot share. Convert the model again."
        )
    return tensor._replace(paired_heads=heads)
