"""Mistral: Llama without biases, in some releases with a sliding window on every layer."""

from __future__ import annotations

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make"]


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=False)
