"""ERNIE 4.5 dense: Llama whose rotary pairs are neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.views import interleaved
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA, Names


def names(c: ModelConfig) -> Names:
    qkv = "blocks.{i}.attn.qkv."
    return (
        ("model.layers.{i}.self_attn.q_proj", qkv + "q", interleaved(c.heads, c.head_dim)),
        ("model.layers.{i}.self_attn.k_proj", qkv + "k", interleaved(c.kv_heads, c.head_dim)),
        *LLAMA,
    )


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072}
    return {"tie_word_embeddings": True, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, **sizes, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.real("compression_ratio", 1.0) != 1.0:
        raise ModelConfigError(f"compression_ratio = {c.raw['compression_ratio']}: only 1 is supported")
    bias = bool(c.raw.get("use_bias"))
    if bias and c.raw.get("weight_share_add_bias"):
        raise ModelConfigError("weight_share_add_bias = true with use_bias = true: a bias of the head is not supported")
    return dense(c, max_model_len, bias=bias, out_bias=bias, mlp_bias=bias)
