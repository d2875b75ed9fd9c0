"""Mistral: Llama without biases, in some releases with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers takes where the config is silent: it then has the first release's window."""
    return {"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=False)
