"""OLMo 1: Llama with layer norms that have no weights and, in the 7B model, q, k and v clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The eps of the norms is in no config, but in the model's code."""
    return {**raw, "rms_norm_eps": 1e-5}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, learned=False)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention,
                rope,
                clip=c.real("clip_qkv", 0.0),
                bias=c.attention_bias,
                out_bias=c.attention_bias,
            ),
            norm2=norm(),
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
        )

    return Decoder(c, block, norm())
