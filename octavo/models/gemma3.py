"""Gemma 3 text: sandwich norms that store w - 1, scaled embeddings, QK-norm, and five sliding layers to each full one;
sliding layers turn by a RoPE base of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import Decoder
from octavo.models.gemma2 import sandwich
from octavo.models.names import LLAMA, QK_NORM, SANDWICH, but
from octavo.ops.contract import Rope

NAMES = (*but(LLAMA, *SANDWICH), *QK_NORM)

DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
}
"""Of transformers' Gemma3TextConfig."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return in_common_words(raw, DEFAULTS)


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    windows, ropes = _layers(c, max_model_len)
    return sandwich(c, windows, [ropes[bool(window)] for window in windows], qk_norm=True)


def _layers(c: ModelConfig, max_model_len: int) -> tuple[tuple[int, ...], dict[bool, Rope]]:
    """Windows by layer, and the RoPE of full (False) and sliding (True) layers, from either spelling of the config."""
    windows = c.windows
    if c.raw.get("layer_types") is None:
        pattern = c.number("sliding_window_pattern", 0) or c.number("_sliding_window_pattern", 0) or 6
        windows = tuple(0 if (i + 1) % pattern == 0 else w for i, w in enumerate(windows))
    nested = c.raw.get("rope_parameters") or {}
    full = {**c.rope, **(nested.get("full_attention") or {})}
    local = {"rope_theta": c.raw["rope_local_base_freq"], **(nested.get("sliding_attention") or {})}
    return windows, {
        False: make_rope(full, c.head_dim, c.max_position_embeddings, max_model_len),
        True: make_rope(local, c.head_dim, c.max_position_embeddings, max_model_len),
    }
