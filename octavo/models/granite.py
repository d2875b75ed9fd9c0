"""Granite 3 and 4 dense: Llama with four multipliers: of embeddings, of q.k, of what a branch adds, and (dividing) of
logits."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make"]


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    def number(key: str) -> float:
        return float(c.raw.get(key, 1.0))

    return dense(
        c,
        max_model_len,
        bias=c.attention_bias,
        out_bias=c.attention_bias,
        mlp_bias=bool(c.mlp_bias),
        attention_scale=number("attention_multiplier"),
        residual_scale=number("residual_multiplier"),
        embed_scale=number("embedding_multiplier"),
        logit_scale=1.0 / number("logits_scaling"),
    )
