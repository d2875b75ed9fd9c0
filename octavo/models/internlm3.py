"""InternLM 3: Llama with one switch for the biases of q, k and v and another for all other biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    biases = {"attention_bias": raw.get("qkv_bias", False), "mlp_bias": raw.get("bias", False)}
    sizes = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768}
    return {"rms_norm_eps": 1e-5, **sizes, **biases, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    bias = bool(c.mlp_bias)
    return dense(c, max_model_len, bias=c.attention_bias, out_bias=bias, mlp_bias=bias)
