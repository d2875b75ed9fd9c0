"""MiniCPM 1, 2 and 4 (text): Llama with scaled embeddings, branches and logits (Hu et al., "MiniCPM", 2024, after
Tensor Programs)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"tie_word_embeddings": True, "scale_emb": 1, "scale_depth": 1, "dim_model_base": 1, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.experts:
        raise ModelConfigError(f"num_experts = {c.experts}: MiniCPM's mixture of experts is not supported")
    sparse = c.raw.get("sparse_config")
    if sparse and max_model_len > (sparse.get("dense_len") or 0):
        raise ModelConfigError(
            f"sparse_config: attention is sparse in contexts longer than dense_len = {sparse.get('dense_len')}, which "
            f"is not supported; max_model_len is {max_model_len}"
        )
    return dense(
        c,
        max_model_len,
        bias=c.attention_bias,
        out_bias=c.attention_bias,
        residual_scale=c.real("scale_depth") / c.layers**0.5,
        embed_scale=c.real("scale_emb"),
        logit_scale=c.real("dim_model_base") / c.hidden_size,
    )
