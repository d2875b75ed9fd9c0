"""GPT-2: learned positions, layer norms, plain MLPs, a bias everywhere; matrices are stored for x @ W."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.linear import Positions
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.views import Transposed
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import Row

_ROWS: tuple[Row, ...] = (
    ("wte", "embed"),
    ("wpe", "positions"),
    ("h.{i}.ln_1", "blocks.{i}.norm1"),
    ("h.{i}.attn.c_attn", "blocks.{i}.attn.qkv", Transposed()),
    ("h.{i}.attn.c_proj", "blocks.{i}.attn.out", Transposed()),
    ("h.{i}.ln_2", "blocks.{i}.norm2"),
    ("h.{i}.mlp.c_fc", "blocks.{i}.mlp.up", Transposed()),
    ("h.{i}.mlp.c_proj", "blocks.{i}.mlp.down", Transposed()),
    ("ln_f", "norm"),
)

NAMES: tuple[Row, ...] = (
    *((f"transformer.{row[0]}", *row[1:]) for row in _ROWS),
    *_ROWS,
    ("lm_head", "lm_head"),
)
"""The first checkpoints hold the model without its head, and name tensors from there."""

IGNORE = ("*.attn.bias", "*.attn.masked_bias")
"""Causal masks that old checkpoints carry."""

WORDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
}

DEFAULTS = {
    "tie_word_embeddings": True,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 1024,
    "scale_attn_weights": True,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = in_common_words(raw, DEFAULTS, WORDS)
    out.setdefault("intermediate_size", 4 * (out.get("hidden_size") or 0))
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.raw.get("add_cross_attention"):
        raise ModelConfigError("add_cross_attention = true: a decoder of an encoder is not supported")
    scale = c.head_dim**-0.5 if c.raw["scale_attn_weights"] else 1.0

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention.multi_head,
                None,
                scale=scale / (i + 1) if c.raw.get("scale_attn_by_inverse_layer_idx") else scale,
                bias=True,
                out_bias=True,
            ),
            norm2=norm(),
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation),
        )

    return Decoder(c, block, norm(), positions=Positions(c.max_position_embeddings, c.hidden_size))
