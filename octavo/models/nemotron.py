"""Nemotron 3 and 4, Minitron: layer norms that store w - 1, an MLP of max(x, 0)^2 without a gate, half of each head
rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig
from octavo.models.decoder import Block, Decoder
from octavo.models.names import PLAIN_MLP as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    given = raw.get("rope_parameters") or {}
    factor = given.get("partial_rotary_factor", raw.get("partial_rotary_factor", 0.5))
    defaults = {"hidden_act": "relu2", "norm_eps": 1e-5, "max_position_embeddings": 4096}
    return {**defaults, **raw, "partial_rotary_factor": factor}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, plus_one=True, bias=True)

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
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation, bias=bool(c.mlp_bias)),
        )

    return Decoder(c, block, norm())
