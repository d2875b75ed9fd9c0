"""GPT-J: attention without biases and a plain MLP with them, side by side behind one layer norm; the first part of each
head is rotated in neighbouring pairs; the head has a bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.layers.views import interleaved
from octavo.models import gpt2
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import Names

IGNORE = gpt2.IGNORE

DEFAULTS = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 2048,
    "rotary_dim": 64,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = in_common_words(raw, DEFAULTS, gpt2.WORDS)
    out.setdefault("intermediate_size", 4 * (out.get("hidden_size") or 0))
    return out


def names(c: ModelConfig) -> Names:
    turned = interleaved(c.heads, c.head_dim, _rotated(c))
    return (
        ("transformer.wte", "embed"),
        ("transformer.h.{i}.ln_1", "blocks.{i}.norm1"),
        ("transformer.h.{i}.attn.{q,k}_proj", "blocks.{i}.attn.qkv.{q,k}", turned),
        ("transformer.h.{i}.attn.v_proj", "blocks.{i}.attn.qkv.v"),
        ("transformer.h.{i}.attn.out_proj", "blocks.{i}.attn.out"),
        ("transformer.h.{i}.mlp.fc_in", "blocks.{i}.mlp.up"),
        ("transformer.h.{i}.mlp.fc_out", "blocks.{i}.mlp.down"),
        ("transformer.ln_f", "norm"),
        ("lm_head", "lm_head"),
    )


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.tie_word_embeddings:
        raise ModelConfigError("tie_word_embeddings = true: a tied head with a bias is not supported")
    rope = make_rope({"rope_theta": 10000.0}, _rotated(c), c.max_position_embeddings, max_model_len)

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(c.attention.multi_head, rope),
            norm2=None,
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation),
            parallel=True,
        )

    return Decoder(c, block, norm(), head_bias=True)


def _rotated(c: ModelConfig) -> int:
    """How many values of each head are rotated."""
    rotated = c.raw["rotary_dim"]
    if not isinstance(rotated, int) or not 0 < rotated <= c.head_dim or rotated % 2:
        raise ModelConfigError(f"rotary_dim = {rotated!r}, an even number up to the head size {c.head_dim} is needed")
    return rotated
