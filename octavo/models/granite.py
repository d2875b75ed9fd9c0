"""Granite 3 and 4 dense: Llama with four multipliers: of embeddings, of q.k, of what a branch adds, and (dividing) of
logits."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make"]


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(
        c,
        max_model_len,
        bias=c.attention_bias,
        out_bias=c.attention_bias,
        mlp_bias=bool(c.mlp_bias),
        attention_scale=c.real("attention_multiplier", 1.0),
        residual_scale=c.real("residual_multiplier", 1.0),
        embed_scale=c.real("embedding_multiplier", 1.0),
        logit_scale=1.0 / c.real("logits_scaling", 1.0, zero=False),
    )
