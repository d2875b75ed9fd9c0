"""Falcon. 7B: attention with one KV head and a plain MLP side by side behind one layer norm, no biases. 40B and 180B:
KV heads for groups of queries, a norm for each branch. RW: ALiBi, one branch after the other, biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.layers.alibi import alibi_slopes
from octavo.layers.attention import Attention
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.layers.views import grouped
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import Names

DEFAULTS = {
    "tie_word_embeddings": True,
    "activation": "gelu",
    "layer_norm_epsilon": 1e-5,
    "multi_query": True,
    "parallel_attn": True,
}

WORDS = {
    "n_embed": "hidden_size",
    "num_kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "activation": "hidden_act",
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Outside the 40B's layout `num_kv_heads` has no effect."""
    out = in_common_words(raw, DEFAULTS, WORDS)
    out.setdefault("intermediate_size", 4 * (out.get("hidden_size") or 0))
    if not out.get("new_decoder_architecture"):
        out["num_key_value_heads"] = 1 if out["multi_query"] else None
    return out


def names(c: ModelConfig) -> Names:
    """GGUF files hold all queries, then keys, then values."""
    layer = "transformer.h.{i}"
    return (
        ("transformer.word_embeddings", "embed"),
        (f"{layer}.ln_attn" if _two_norms(c) else f"{layer}.input_layernorm", "blocks.{i}.norm1"),
        (
            f"{layer}.self_attention.query_key_value",
            "blocks.{i}.attn.qkv",
            grouped(c.heads, c.kv_heads, c.head_dim, in_gguf=False),
        ),
        (f"{layer}.self_attention.dense", "blocks.{i}.attn.out"),
        (f"{layer}.ln_mlp" if _two_norms(c) else f"{layer}.post_attention_layernorm", "blocks.{i}.norm2"),
        (f"{layer}.mlp.dense_h_to_4h", "blocks.{i}.mlp.up"),
        (f"{layer}.mlp.dense_4h_to_h", "blocks.{i}.mlp.down"),
        ("transformer.ln_f", "norm"),
        ("lm_head", "lm_head"),
    )


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    bias, parallel = bool(c.raw.get("bias")), bool(c.raw["parallel_attn"])
    if c.raw.get("new_decoder_architecture") and not parallel:
        raise ModelConfigError("parallel_attn = false together with new_decoder_architecture = true is not supported")
    if c.raw.get("apply_residual_connection_post_layernorm"):
        raise ModelConfigError("apply_residual_connection_post_layernorm = true: such a residual is not supported")
    alibi = bool(c.raw.get("alibi"))
    rope = None if alibi else make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention,
                rope,
                alibi=_slopes(c) if alibi else (),
                bias=bias,
                out_bias=bias,
            ),
            norm2=norm() if _two_norms(c) or not parallel else None,
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation, bias=bias),
            parallel=parallel,
        )

    return Decoder(c, block, norm())


def _two_norms(c: ModelConfig) -> bool:
    return bool(c.raw.get("new_decoder_architecture")) and c.raw.get("num_ln_in_parallel_attn") in (None, 2)


def _slopes(c: ModelConfig) -> tuple[float, ...]:
    """Falcon adds slope * position to the score before it is scaled, with slopes in bfloat16 (the release's code). That
    code rounds the products to bfloat16 too, an error that grows with the position and is not repeated here."""
    bits = np.array(alibi_slopes(c.heads), np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)  # to nearest, ties to even
    return tuple(float(slope) * c.head_dim**-0.5 for slope in rounded.view(np.float32))
