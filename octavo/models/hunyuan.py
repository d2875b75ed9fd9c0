"""Hunyuan dense: Llama with RMS norms on the heads of q and k after their rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA

NAMES = (
    *LLAMA,
    ("model.layers.{i}.self_attn.query_layernorm", "blocks.{i}.attn.q_norm"),
    ("model.layers.{i}.self_attn.key_layernorm", "blocks.{i}.attn.k_norm"),
)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"rms_norm_eps": 1e-5, "use_qk_norm": True, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.raw.get("use_cla"):
        raise ModelConfigError("use_cla = true: layers that share keys and values are not supported")
    if c.experts > 1:
        raise ModelConfigError(f"num_experts = {c.experts} in a dense model")
    return dense(
        c,
        max_model_len,
        bias=c.attention_bias,
        out_bias=c.attention_bias,
        mlp_bias=bool(c.mlp_bias),
        qk_norm=bool(c.raw["use_qk_norm"]),
        norm_after=True,
    )
