"""Qwen 3 dense: Llama with an RMS norm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA, QK_NORM
from octavo.models.qwen2 import rewrite as _as_qwen2

NAMES = (*LLAMA, *QK_NORM)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"head_dim": 128, "num_key_value_heads": 32, **_as_qwen2(raw)}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=c.attention_bias, out_bias=c.attention_bias, qk_norm=True)
