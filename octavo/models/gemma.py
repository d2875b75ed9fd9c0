"""Gemma: Llama with norms that store w - 1, embeddings scaled by the root of their width, and heads wider than their
share of it."""

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
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make", "rewrite"]


DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first files say "gelu" and mean its tanh form."""
    out = in_common_words(raw, DEFAULTS)
    if (out.get("hidden_activation") or out["hidden_act"]) == "gelu":
        out["hidden_activation"] = "gelu_pytorch_tanh"
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    refuse_bidirectional(c)
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, c.eps, plus_one=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention,
                rope,
                bias=c.attention_bias,
                out_bias=c.attention_bias,
            ),
            norm2=norm(),
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
        )

    return Decoder(c, block, norm(), embed_scale=float(np.float32(c.hidden_size**0.5)))


def refuse_bidirectional(c: ModelConfig) -> None:
    """Raises ModelConfigError for the family's models that see what comes after a token."""
    if c.raw.get("use_bidirectional_attention"):
        raise ModelConfigError("use_bidirectional_attention = true: this is an embedding model, not supported yet")
