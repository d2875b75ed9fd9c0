"""Ministral 3 (text): Mistral with YaRN, and queries that grow with the logarithm of their distance from the start, by
Llama 4's formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.rope import checked
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES
from octavo.ops.contract import Temperature

__all__ = ["NAMES", "make", "rewrite"]

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Where the config has none."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144}
    out = {"rms_norm_eps": 1e-5, **sizes, **raw}
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        out["rope_parameters"] = _ROPE
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rope = checked(c.rope)
    beta = rope.get("llama_4_scaling_beta")
    floor = rope.get("original_max_position_embeddings") or c.max_position_embeddings
    temperature = Temperature(float(beta), float(floor), start=0) if beta else None
    return dense(c, max_model_len, bias=False, temperature=temperature)
