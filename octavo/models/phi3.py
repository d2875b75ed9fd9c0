"""Phi-3, 3.5 mini and 4: Llama with q, k, v and gate, up in one matrix each; long RoPE, partial rotation (Phi-4-mini)
and a sliding window where the config asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA

NAMES = (
    *(row for row in LLAMA if "qkv" not in row[1] and "gate_up" not in row[1]),
    ("model.layers.{i}.self_attn.qkv_proj", "blocks.{i}.attn.qkv"),
    ("model.layers.{i}.mlp.gate_up_proj", "blocks.{i}.mlp.gate_up"),
)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The original context of long RoPE lies outside its parameters; files of 2024 call the kind "su" or "yarn", and
    transformers reads both as "longrope"."""
    out = in_common_words(raw, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096})
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = rope.pop("type", None)
    kind = rope.get("rope_type") or kind
    if kind:
        original = raw.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or 4096
        rope["rope_type"] = "longrope" if kind in ("su", "yarn") else kind
        out["rope_parameters"] = {**rope, "original_max_position_embeddings": original}
        out["rope_scaling"] = None
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=False)
