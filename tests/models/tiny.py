"""Tiny random checkpoints of each architecture, made by transformers, and ways to run them on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import find
from octavo.models.weights import load
from octavo.ops.contract import BatchArrays, BatchLimits, CompiledModel, Device, KVSpec

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

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-mha-bias": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "llama-rope-llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-rope-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
"""Name -> (family, what its config changes)."""


def make(name: str, folder: Path, seed: int = 0) -> tuple[Path, Any]:
    """Write the checkpoint of a variant; returns (folder, transformers' model in float32, eval mode)."""
    import torch
    import transformers

    family, changes = VARIANTS[name]
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(**{**COMMON, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, family + "ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for value in model.parameters():  # norms and biases start at 1 and 0: move them off
            if value.ndim == 1:
                value.add_(torch.randn_like(value) * 0.2)
    model.save_pretrained(folder / name)
    return folder / name, model


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
    ):
        with open_checkpoint(path) as checkpoint:
            name, architecture = find(checkpoint.config)
            self.config = ModelConfig.read(checkpoint.config, name)
            self.model: Decoder = architecture.make(self.config, max_model_len)
            load(self.model, checkpoint, architecture.names, device, architecture.ignore)
        self.block_size = block_size
        group_of = [0] * self.config.layers
        for index, group in enumerate(self.model.groups):
            for layer in group.layers:
                group_of[layer] = index
        self.spec = KVSpec(
            self.config.layers,
            self.config.kv_heads,
            self.config.head_dim,
            kv_dtype,
            block_size,
            (blocks,) * len(self.model.groups),
            tuple(group_of),
        )
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
