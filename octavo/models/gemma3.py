"""Gemma 3 text: sandwich norms that store w - 1, scaled embeddings, QK-norm, and five sliding layers to each full one;
sliding layers turn by a RoPE base of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA, QK_NORM
from octavo.ops.contract import Rope

NAMES = (
    *(row for row in LLAMA if not row[0].endswith("post_attention_layernorm")),
    *QK_NORM,
    ("model.layers.{i}.post_attention_layernorm", "blocks.{i}.post1"),
    ("model.layers.{i}.pre_feedforward_layernorm", "blocks.{i}.norm2"),
    ("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.post2"),
)

DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
"""Of transformers' Gemma3TextConfig."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return in_common_words(raw, DEFAULTS)


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    windows, ropes = _layers(c, max_model_len)
    if c.raw.get("use_bidirectional_attention"):
        raise ModelConfigError("use_bidirectional_attention = true: this is an embedding model, not supported yet")

    def norm(width: int) -> RMSNorm:
        return RMSNorm(width, c.eps, plus_one=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(c.hidden_size),
            attn=Attention(
                c.hidden_size,
                c.heads,
                c.kv_heads,
                c.head_dim,
                ropes[bool(windows[i])],
                window=windows[i],
                scale=c.real("query_pre_attn_scalar", zero=False) ** -0.5,
                softcap=c.real("attn_logit_softcapping", 0.0),
                bias=c.attention_bias,
                out_bias=c.attention_bias,
                q_norm=norm(c.head_dim),
                k_norm=norm(c.head_dim),
            ),
            post1=norm(c.hidden_size),
            norm2=norm(c.hidden_size),
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
            post2=norm(c.hidden_size),
        )

    return Decoder(
        c,
        block,
        norm(c.hidden_size),
        embed_scale=float(np.float32(c.hidden_size**0.5)),
        logit_softcap=c.real("final_logit_softcapping", 0.0),
    )


def _layers(c: ModelConfig, max_model_len: int) -> tuple[tuple[int, ...], dict[bool, Rope]]:
    """Windows by layer, and the RoPE of full (False) and sliding (True) layers, from either spelling of the config."""
    windows = c.windows
    if c.raw.get("layer_types") is None:
        pattern = c.number("sliding_window_pattern", 0) or c.number("_sliding_window_pattern", 0) or 6
        windows = tuple(0 if (i + 1) % pattern == 0 else w for i, w in enumerate(windows))
    nested = c.raw.get("rope_parameters") or {}
    full = {**c.rope, **(nested.get("full_attention") or {})}
    local = {"rope_theta": c.raw["rope_local_base_freq"], **(nested.get("sliding_attention") or {})}
    return windows, {
        False: make_rope(full, c.head_dim, c.max_position_embeddings, max_model_len),
        True: make_rope(local, c.head_dim, c.max_position_embeddings, max_model_len),
    }
