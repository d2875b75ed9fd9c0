"""OLMoE: mixtures of experts, and norms over all query heads and all key heads of a token (Muennighoff et al., "OLMoE:
Open mixture-of-experts language models", 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.moe import MoE
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig
from octavo.models.decoder import Block, Decoder
from octavo.models.names import EXPERTS, LLAMA, QK_NORM
from octavo.ops.contract import Router

NAMES = (*EXPERTS, *LLAMA, *QK_NORM)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers takes where the config is silent."""
    return {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)
    router = Router(c.number("num_experts_per_tok", 8), renormalize=bool(c.raw.get("norm_topk_prob")))
    bias = bool(c.attention_bias)

    def block(i: int) -> Block:
        return Block(
            norm1=RMSNorm(c.hidden_size, c.eps),
            attn=Attention(
                c.attention,
                rope,
                clip=c.real("clip_qkv", 0.0),
                bias=bias,
                out_bias=bias,
                q_norm=RMSNorm(c.heads * c.head_dim, c.eps),
                k_norm=RMSNorm(c.kv_heads * c.head_dim, c.eps),
                norm_over="all",
            ),
            norm2=RMSNorm(c.hidden_size, c.eps),
            mlp=MoE(c.hidden_size, c.intermediate_size, c.experts, router, c.activation),
        )

    return Decoder(c, block, RMSNorm(c.hidden_size, c.eps))
