"""Helium 1 (Kyutai): Llama whose rotary pairs are neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.ernie import names

__all__ = ["make", "names", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes = {"num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096}
    return {"rope_theta": 100000.0, "rms_norm_eps": 1e-8, "attention_bias": False, **sizes, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=c.attention_bias, mlp_bias=bool(c.mlp_bias))
