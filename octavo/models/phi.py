"""Phi-1, 1.5 and 2: attention and a plain MLP side by side behind one layer norm, part of each head rotated, biases
everywhere, the head's included."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Block, Decoder

NAMES = (
    ("model.embed_tokens", "embed"),
    ("model.layers.{i}.input_layernorm", "blocks.{i}.norm1"),
    ("model.layers.{i}.self_attn.{q,k,v}_proj", "blocks.{i}.attn.qkv.{q,k,v}"),
    ("model.layers.{i}.self_attn.qkv_proj", "blocks.{i}.attn.qkv"),  # the first GGUF files
    ("model.layers.{i}.self_attn.dense", "blocks.{i}.attn.out"),
    ("model.layers.{i}.mlp.fc1", "blocks.{i}.mlp.up"),
    ("model.layers.{i}.mlp.fc2", "blocks.{i}.mlp.down"),
    ("model.final_layernorm", "norm"),
    ("lm_head", "lm_head"),
)

DEFAULTS = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return in_common_words(raw, DEFAULTS)


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.raw.get("qk_layernorm"):
        raise ModelConfigError("qk_layernorm = true: norms of queries and keys with a bias are not supported")
    if c.tie_word_embeddings:
        raise ModelConfigError("tie_word_embeddings = true: a tied head with a bias is not supported")
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(c.attention, rope, bias=True, out_bias=True),
            norm2=None,
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation),
            parallel=True,
        )

    return Decoder(c, block, norm(), head_bias=True)
