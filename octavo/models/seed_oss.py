"""Seed-OSS: Llama with biases on q, k and v, and a switch for one on the output projection."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288}
    return {"attention_bias": True, **sizes, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    out_bias = bool(c.raw.get("attention_out_bias"))
    return dense(c, max_model_len, bias=c.attention_bias, out_bias=out_bias, mlp_bias=bool(c.mlp_bias))
