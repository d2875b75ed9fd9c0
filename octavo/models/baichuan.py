"""Baichuan 1 and 2: Llama with q, k and v in one matrix.

The 13B models have ALiBi instead of RoPE. In Baichuan 2 the rows of the head are scaled to length 1 ("NormHead": Yang
et al., "Baichuan 2", 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers import views
from octavo.layers.alibi import alibi_slopes
from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA, Names, but

_VOCAB_2 = 125696
"""Of Baichuan 2; Baichuan 1 has 64000."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Only the 7B models say max_position_embeddings; the 13B ones, which have no such embeddings, model_max_length."""
    alibi = raw.get("max_position_embeddings") is None
    return {
        **raw,
        "alibi": alibi,
        "max_position_embeddings": raw.get("model_max_length") if alibi else raw["max_position_embeddings"],
        # No file names the head; z_loss_weight, a number of Baichuan 2's training, is in that model's configs only.
        "norm_head": raw.get("vocab_size") == _VOCAB_2 or "z_loss_weight" in raw,
    }


def names(c: ModelConfig) -> Names:
    fused = (
        *(row for row in LLAMA if "{q,k,v}" not in row[0]),
        ("model.layers.{i}.self_attn.W_pack", "blocks.{i}.attn.qkv"),
        ("model.layers.{i}.self_attn.{q,k,v}_proj", "blocks.{i}.attn.qkv.{q,k,v}"),  # GGUF
    )
    return but(fused, ("lm_head", "lm_head", views.UnitRows())) if c.raw["norm_head"] else fused


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.raw["norm_head"] and c.tie_word_embeddings:
        raise ModelConfigError("tie_word_embeddings = true: Baichuan 2 has a head of its own")
    alibi = alibi_slopes(c.heads) if c.raw["alibi"] else ()
    rope = None if alibi else make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def block(i: int) -> Block:
        return Block(
            norm1=RMSNorm(c.hidden_size, c.eps),
            attn=Attention(c.attention, rope, alibi=alibi),
            norm2=RMSNorm(c.hidden_size, c.eps),
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
        )

    return Decoder(c, block, RMSNorm(c.hidden_size, c.eps))
