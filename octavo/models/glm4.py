"""GLM-4-0414 and GLM-Z1: GLM-4 with each branch normed again before it is added."""

from __future__ import annotations

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models import glm
from octavo.models.config import ModelConfig
from octavo.models.decoder import Block, Decoder
from octavo.models.glm import rewrite
from octavo.models.names import Names

__all__ = ["make", "names", "rewrite"]


def names(c: ModelConfig) -> Names:
    return (
        *glm.names(c),
        ("model.layers.{i}.post_self_attn_layernorm", "blocks.{i}.post1"),
        ("model.layers.{i}.post_mlp_layernorm", "blocks.{i}.post2"),
    )


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> RMSNorm:
        return RMSNorm(c.hidden_size, c.eps)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(c.attention, rope, bias=c.attention_bias),
            post1=norm(),
            norm2=norm(),
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
            post2=norm(),
        )

    return Decoder(c, block, norm())
