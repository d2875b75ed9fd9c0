"""Tiny random checkpoints of each architecture, made by transformers, and ways to run them on a device.

A family's variants are in a module of `tests.models.families`, in a dict `VARIANTS`.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint import open_checkpoint
from octavo.models.decoder import Decoder
from octavo.models.registry import find
from octavo.models.weights import load
from octavo.ops.contract import BatchArrays, BatchLimits, CompiledModel, Device, KVSpec, Stored
from octavo.parallel.rank import Rank
from octavo.resolve import with_scales
from tests.models import families
from tests.models.variant import Variant

COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""What every variant's config starts from."""


def _collect() -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(families.__path__)):
        variants = importlib.import_module(f"tests.models.families.{module}").VARIANTS
        assert not found.keys() & variants.keys(), f"two variants of one name in {module}"
        found.update(variants)
    return found


VARIANTS = _collect()
"""Every variant of every family, by name."""


def make(name: str, folder: Path, seed: int = 0) -> tuple[Path, Any]:
    """Write the checkpoint of a variant; returns (folder, transformers' model in float32, eval mode)."""
    import torch
    import transformers

    variant = VARIANTS[name]
    config = getattr(transformers, variant.config or variant.family + "Config")(
        **({**COMMON, **variant.changes} if variant.common else variant.changes)
    )
    torch.manual_seed(seed)
    model = getattr(transformers, variant.model or variant.family + "ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for value in model.parameters():  # norms and biases start at 1 and 0: move them off
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.2)
        if variant.adjust is not None:
            variant.adjust(model)
    path = folder / name
    model.save_pretrained(path)
    if variant.rewrite is not None:
        _rewrite(path, variant.rewrite)
    return path, model


def save_bfloat16(path: Path, folder: Path) -> Path:
    """Copy the checkpoint in `path` to `folder` with its values rounded to bfloat16; returns `folder`."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(path, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: value.to(torch.bfloat16) for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def _rewrite(path: Path, rewrite: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    from safetensors.numpy import load_file, save_file

    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    rewrite(config, tensors)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: np.asarray(value, order="C") for name, value in tensors.items()}, path / "model.safetensors")


class Loaded:
    """A model on a device with a KV cache of its own, driven by hand: no scheduler, blocks as the caller says."""

    def __init__(
        self,
        path: Path,
        device: Device,
        *,
        max_model_len: int = 512,
        blocks: int = 128,
        block_size: int = 16,
        kv_dtype: str = "float32",
        tokens: int = 1024,
        sequences: int = 64,
        rank: Rank | None = None,
        quantize: Callable[[Stored], Stored] | None = None,
        quantize_tables: Callable[[Stored], Stored] | None = None,
    ):
        with open_checkpoint(path) as checkpoint:
            architecture = find(checkpoint.config)
            self.config = architecture.config(checkpoint.config)
            self.model: Decoder = architecture.make(self.config, max_model_len)
            if rank is not None:
                self.model.split(rank)
            names, ignore = architecture.names(self.config), architecture.ignore(self.config)
            load(self.model, checkpoint, names, device, ignore, quantize=quantize, quantize_tables=quantize_tables)
            scales = checkpoint.cache
        self.block_size = block_size
        group_of = [0] * sum(len(group.layers) for group in self.model.groups)
        for index, group in enumerate(self.model.groups):
            for layer in group.layers:
                group_of[layer] = index
        self.spec = KVSpec(
            len(group_of),
            self.model.kv.kv_heads,
            self.model.kv.head_dim,
            kv_dtype,
            block_size,
            (blocks,) * len(self.model.groups),
            tuple(group_of),
            self.model.kv.latent,
        )
        self.spec, self.notes = with_scales(self.spec, self.model.caches, scales)
        self.limits = BatchLimits(tokens, sequences, tokens, max_model_len)
        self.compiled: CompiledModel = device.compile(
            self.model.body, self.model.head, self.limits, device.kv_cache(self.spec)
        )
        self.width = -(-max_model_len // block_size)

    def batch(
        self, sequences: Sequence[tuple[Sequence[int], int]], tables: Sequence[Sequence[int]], rows: str = "last"
    ) -> BatchArrays:
        """A step over (tokens, start) sequences; sequence s uses the block ids tables[s] in every KV group."""
        table = np.zeros((self.limits.sequences, self.width), np.int32)
        for s, blocks in enumerate(tables):
            table[s, : len(blocks)] = blocks
        lengths = [len(t) for t, _ in sequences]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        total = int(starts[-1])
        return BatchArrays(
            tokens=np.concatenate([np.asarray(t, np.int32) for t, _ in sequences]),
            positions=np.concatenate([np.arange(b, b + len(t), dtype=np.int32) for t, b in sequences]),
            starts=starts,
            slots=np.arange(len(sequences), dtype=np.int32),
            rows=starts[1:] - np.int32(1) if rows == "last" else np.arange(total, dtype=np.int32),
            tables=(table,) * len(self.spec.blocks),
        )

    def logits(self, tokens: Sequence[int], chunks: Sequence[int] = ()) -> np.ndarray:  # type: ignore[type-arg]
        """[len(tokens), vocab]: logits of every position, computed in chunks of the given sizes (then the rest)."""
        blocks = range(-(-len(tokens) // self.block_size))
        out, start = [], 0
        for n in [*chunks, len(tokens)]:
            n = min(n, len(tokens) - start)
            if n > 0:
                out.append(self.compiled.raw_logits(self.batch([(tokens[start : start + n], start)], [blocks], "all")))
                start += n
        return np.concatenate(out)
