"""Gemma 3 text: sandwich norms that store w - 1, scaled embeddings, QK-norm, and five sliding layers to each full one;
sliding layers turn by a RoPE base of their own."""

from __future__ import annotations

import numpy as np

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, ModelConfigError
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
                scale=float(c.raw.get("query_pre_attn_scalar") or c.head_dim) ** -0.5,
                softcap=float(c.raw.get("attn_logit_softcapping") or 0.0),
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
        logit_softcap=float(c.raw.get("final_logit_softcapping") or 0.0),
    )


def _layers(c: ModelConfig, max_model_len: int) -> tuple[tuple[int, ...], dict[bool, Rope]]:
    """Windows by layer, and the RoPE of full (False) and sliding (True) layers, from either spelling of the config."""
    windows = c.windows
    if "layer_types" not in c.raw:
        pattern = int(c.raw.get("sliding_window_pattern") or c.raw.get("_sliding_window_pattern") or 6)
        windows = tuple(0 if (i + 1) % pattern == 0 else w for i, w in enumerate(windows))
    nested = c.raw.get("rope_parameters") or {}
    full = dict(c.rope)
    if "full_attention" in nested:
        full = dict(nested["full_attention"])
        local = dict(nested.get("sliding_attention") or full)
    else:
        local = {"rope_type": "default", "rope_theta": c.raw.get("rope_local_base_freq") or 10000.0}
    return windows, {
        False: make_rope(full, c.head_dim, c.max_position_embeddings, max_model_len),
        True: make_rope(local, c.head_dim, c.max_position_embeddings, max_model_len),
    }
