"""SmolLM3: Llama where some layers, by default every fourth, do not rotate q and k; only those may slide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig, ModelConfigError, whole
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA as NAMES

__all__ = ["NAMES", "make", "rewrite"]


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    defaults = {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rope_theta": 2000000.0}
    out = {"tie_word_embeddings": True, "use_sliding_window": False, **defaults, **raw}
    layers, interval = whole(raw, "num_hidden_layers", 0), whole(raw, "no_rope_layer_interval", 0) or 4
    rotates = raw.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    out["no_rope_layers"] = rotates
    if raw.get("layer_types") is None:
        slides = out["use_sliding_window"] and raw.get("sliding_window")
        out["layer_types"] = [
            "sliding_attention" if slides and not rotates[i] else "full_attention" for i in range(layers)
        ]
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rotates = c.raw["no_rope_layers"]  # 1 where the layer does rotate, against its name
    if len(rotates) < c.layers:
        raise ModelConfigError(f"no_rope_layers lists {len(rotates)} layers, num_hidden_layers says {c.layers}")
    model = dense(c, max_model_len, bias=c.attention_bias, out_bias=c.attention_bias, mlp_bias=bool(c.mlp_bias))
    for block, rotated in zip(model.blocks, rotates, strict=False):
        if not rotated:
            block.attn.rope = None
    return model
