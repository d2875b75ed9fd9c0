"""Qwen 3 dense: Llama with an RMS norm on each query and key head."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA, QK_NORM

NAMES = (*LLAMA, *QK_NORM)


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=c.attention_bias, out_bias=c.attention_bias, qk_norm=True)
