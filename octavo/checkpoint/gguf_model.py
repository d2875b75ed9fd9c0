"""A GGUF file as a checkpoint: Hugging Face names, order of rows and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.gguf import read_gguf
from octavo.checkpoint.gguf_config import Metadata, generation, translate
from octavo.checkpoint.gguf_names import hugging_face_name
from octavo.checkpoint.tensor import Tensor
from octavo.ops.contract import Stored
from octavo.quant import dense

_ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path) -> Checkpoint:
    """Read the metadata and the tensor table of a .gguf file. Raises CheckpointError."""
    metadata, own = read_gguf(path)
    architecture = Metadata(path, metadata).architecture
    factors = own.pop(_ROPE_FACTORS, None)
    tensors: dict[str, Tensor] = {}
    for name, tensor in own.items():
        translated = hugging_face_name(architecture, name)
        if translated in tensors:
            raise CheckpointError(
                f"{path} has two tensors for {translated!r}, one of them {name!r}. Convert the model again."
            )
        tensors[translated] = tensor
    config = translate(path, metadata, {name: tensor.shape for name, tensor in tensors.items()})
    if factors is not None:
        config["rope_freq_factors"] = _factors(path, factors, config)
    if architecture == "llama":
        tensors = {name: _mark_paired(path, name, tensor, config) for name, tensor in tensors.items()}
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
    """Files of the llama architecture keep the rows of q and k so that rotary pairs are neighbours."""
    if ".self_attn.q_proj." in name:
        heads = config["num_attention_heads"]
    elif ".self_attn.k_proj." in name:
        heads = config["num_key_value_heads"]
    else:
        return tensor
    if not heads or tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{path}: {name!r} has {tensor.shape[0]} rows, which {heads} heads cannot share. Convert the model again."
        )
    return tensor._replace(paired_heads=heads)
