"""Llama 1 to 3.x and every checkpoint that says it is one (Yi, TinyLlama, SmolLM 1 and 2, …)."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make"]


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=c.attention_bias, out_bias=c.attention_bias, mlp_bias=bool(c.mlp_bias))
