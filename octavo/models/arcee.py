"""Arcee AFM: Llama with an MLP without a gate, max(x, 0)^2 between its two matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.mlp import PlainMLP
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import PLAIN_MLP as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    def mlp(i: int) -> PlainMLP:
        return PlainMLP(c.hidden_size, c.intermediate_size, c.activation, bias=bool(c.mlp_bias))

    return dense(c, max_model_len, bias=c.attention_bias, out_bias=c.attention_bias, mlp=mlp)
