"""StarCoder and SantaCoder (GPT-BigCode): GPT-2 with one KV head for all queries, and matrices the usual way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.linear import Positions
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.views import grouped
from octavo.models import gpt2
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import Names

IGNORE = ("transformer.bias", *gpt2.IGNORE)
"""Causal masks that old checkpoints carry."""

DEFAULTS = {**gpt2.DEFAULTS, "activation_function": "gelu_pytorch_tanh", "multi_query": True}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = in_common_words(raw, DEFAULTS, gpt2.WORDS)
    out.setdefault("intermediate_size", 4 * (out.get("hidden_size") or 0))
    out["num_key_value_heads"] = 1 if out["multi_query"] else None
    return out


def names(c: ModelConfig) -> Names:
    """With a KV head per query head, q, k and v of a head lie together; with one for all, one after another."""
    return (
        ("transformer.wte", "embed"),
        ("transformer.wpe", "positions"),
        ("transformer.h.{i}.ln_1", "blocks.{i}.norm1"),
        ("transformer.h.{i}.attn.c_attn", "blocks.{i}.attn.qkv", grouped(c.heads, c.kv_heads, c.head_dim)),
        ("transformer.h.{i}.attn.c_proj", "blocks.{i}.attn.out"),
        ("transformer.h.{i}.ln_2", "blocks.{i}.norm2"),
        ("transformer.h.{i}.mlp.c_fc", "blocks.{i}.mlp.up"),
        ("transformer.h.{i}.mlp.c_proj", "blocks.{i}.mlp.down"),
        ("transformer.ln_f", "norm"),
        ("lm_head", "lm_head"),
    )


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.raw.get("add_cross_attention"):
        raise ModelConfigError("add_cross_attention = true: a decoder of an encoder is not supported")

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention,
                None,
                scale=c.head_dim**-0.5 if c.raw["scale_attn_weights"] else 1.0,
                bias=True,
                out_bias=True,
            ),
            norm2=norm(),
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation),
        )

    return Decoder(c, block, norm(), positions=Positions(c.max_position_embeddings, c.hidden_size))
