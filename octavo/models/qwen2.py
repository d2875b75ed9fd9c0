"""Qwen 1.5, 2 and 2.5: Llama with a bias on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Windows are off unless `use_sliding_window` is true; then the layers from `max_window_layers` on slide, unless
    `layer_types` says which (transformers 5)."""
    out = {"use_sliding_window": False, "max_window_layers": 28, "max_position_embeddings": 32768, **raw}
    return {"sliding_window": 4096, **out} if out["use_sliding_window"] else out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=True)
