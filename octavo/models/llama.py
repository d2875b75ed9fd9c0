"""Llama 1 to 3.x and every checkpoint that says it is one (Yi, TinyLlama, SmolLM 1 and 2, …)."""

from __future__ import annotations

from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make"]


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.mlp_bias:
        raise ModelConfigError("mlp_bias = true is not supported yet: no released Llama model sets it")
    return dense(c, max_model_len, bias=c.attention_bias, out_bias=c.attention_bias)
