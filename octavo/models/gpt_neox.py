"""GPT-NeoX and Pythia: layer norms, a plain MLP beside the attention (or after it), each behind a norm of its own, a
quarter of each head rotated; q, k and v of a head lie together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.layers.views import grouped
from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import Names

IGNORE = ("*.attention.bias", "*.attention.masked_bias")
"""Causal masks that old checkpoints carry."""

DEFAULTS = {
    "attention_bias": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_parallel_residual": True,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return in_common_words(raw, DEFAULTS, {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"})


def names(c: ModelConfig) -> Names:
    """GGUF files hold all queries, then keys, then values."""
    layer = "gpt_neox.layers.{i}"
    return (
        ("gpt_neox.embed_in", "embed"),
        (f"{layer}.input_layernorm", "blocks.{i}.norm1"),
        (
            f"{layer}.attention.query_key_value",
            "blocks.{i}.attn.qkv",
            grouped(c.heads, c.heads, c.head_dim, in_gguf=False),
        ),
        (f"{layer}.attention.dense", "blocks.{i}.attn.out"),
        (f"{layer}.post_attention_layernorm", "blocks.{i}.norm2"),
        (f"{layer}.mlp.dense_h_to_4h", "blocks.{i}.mlp.up"),
        (f"{layer}.mlp.dense_4h_to_h", "blocks.{i}.mlp.down"),
        ("gpt_neox.final_layer_norm", "norm"),
        ("embed_out", "lm_head"),
        ("lm_head", "lm_head"),
    )


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention.multi_head,
                rope,
                bias=c.attention_bias,
                out_bias=c.attention_bias,
            ),
            norm2=norm(),
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation),
            parallel=bool(c.raw["use_parallel_residual"]),
        )

    return Decoder(c, block, norm())
