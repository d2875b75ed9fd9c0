"""A GGUF file as a checkpoint: Hugging Face names, order of rows and configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.errors import CheckpointError, believing
from octavo.checkpoint.gguf_config import family_of, generation, translate
from octavo.checkpoint.gguf_metadata import Metadata
from octavo.checkpoint.gguf_split import read_parts
from octavo.checkpoint.tensor import Tensor
from octavo.ops.contract import Stored
from octavo.quant import dense

ROTARY = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that say how RoPE is scaled: for us a part of the configuration."""


def open_gguf(path: Path) -> Checkpoint:
    """Read the metadata and the tensor table of a .gguf file; of a model in several parts, all of them. Raises
    CheckpointError."""
    metadata, own = read_parts(path)
    with believing(f"{path}: the metadata"):
        return _checkpoint(path, metadata, own)


def _checkpoint(path: Path, metadata: dict[str, Any], own: dict[str, Tensor]) -> Checkpoint:
    rotary = {name: _numbers(own.pop(f"{name}.weight")) for name in ROTARY if f"{name}.weight" in own}
    meta = Metadata(path, metadata, {name: tensor.shape for name, tensor in own.items()}, rotary)
    family = family_of(meta)
    names = family.names if family.names_of is None else family.names_of(meta)
    config = translate(meta, family)
    tensors: dict[str, Tensor] = {}
    for stack in family.stacks:
        if stack in own and len(own[stack].shape) == 3 and own[stack].shape[0]:
            tensors.update(_entries(names.hugging_face(stack), own.pop(stack)))
    for name, tensor in own.items():
        if meta.is_beyond(name):
            continue
        translated = names.hugging_face(name)
        if translated in tensors:
            raise CheckpointError(
                f"{path} has two tensors for {translated!r}, one of them {name!r}. Convert the model again."
            )
        tensor = tensor._replace(shape=_whole_shape(name, tensor.shape))
        tensors[translated] = _mark_paired(path, name, tensor, config) if family.paired else tensor
    for key, (name, shape) in family.vectors.items():
        for i, value in enumerate(meta.per_layer(key) or ()):
            data = np.float32(value).reshape(1).view(np.uint8)
            tensors[f"{names.prefix}{i}.{name}"] = Tensor("F32", shape, data, path)
    return Checkpoint(path, "gguf", config, generation(metadata), tensors, metadata)


def _numbers(tensor: Tensor) -> list[float]:
    count = math.prod(tensor.shape)
    return [float(n) for n in dense(Stored(tensor.kind, 1, count, tensor.data.reshape(1, -1)))[0]]


def _entries(name: str, stack: Tensor) -> dict[str, Tensor]:
    """The matrices of a stack, each under its number."""
    stem, _, ending = name.rpartition(".")
    entries = stack.data.reshape(stack.shape[0], -1)
    return {f"{stem}.{i}.{ending}": stack._replace(shape=stack.shape[1:], data=data) for i, data in enumerate(entries)}


def _whole_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of tensors with a dimension of 1, which converters of other years wrote or left out."""
    if name.endswith(".ffn_gate_inp_shexp.weight"):
        return (1, shape[-1])
    return shape[-1:] if name.endswith(".exp_probs_b.bias") else shape


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
