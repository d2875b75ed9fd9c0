"""Gemma 2: sandwich norms that store w - 1, scaled embeddings, soft caps on scores and logits, and sliding and full
layers by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.gemma import refuse_bidirectional
from octavo.models.names import LLAMA, SANDWICH, but
from octavo.ops.contract import Rope

NAMES = but(LLAMA, *SANDWICH)

DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return in_common_words(raw, DEFAULTS)


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    windows = c.windows
    if c.raw.get("layer_types") is None:
        windows = tuple(0 if i % 2 else window for i, window in enumerate(windows))
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)
    return sandwich(c, windows, [rope] * c.layers)


def sandwich(c: ModelConfig, windows: Sequence[int], ropes: Sequence[Rope], *, qk_norm: bool = False) -> Decoder:
    """What Gemma 2 and 3 share. `windows` and `ropes` are by layer; `qk_norm`: on each query and key head."""
    refuse_bidirectional(c)

    def norm(width: int) -> RMSNorm:
        return RMSNorm(width, c.eps, plus_one=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(c.hidden_size),
            attn=Attention(
                c.attention,
                ropes[i],
                window=windows[i],
                scale=c.real("query_pre_attn_scalar", zero=False) ** -0.5,
                softcap=c.real("attn_logit_softcapping", 0.0),
                bias=c.attention_bias,
                out_bias=c.attention_bias,
                q_norm=norm(c.head_dim) if qk_norm else None,
                k_norm=norm(c.head_dim) if qk_norm else None,
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
