"""EXAONE 3 and 3.5: Llama under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense

NAMES = (
    ("transformer.wte", "embed"),
    ("transformer.h.{i}.ln_1", "blocks.{i}.norm1"),
    ("transformer.h.{i}.attn.attention.{q,k,v}_proj", "blocks.{i}.attn.qkv.{q,k,v}"),
    ("transformer.h.{i}.attn.attention.out_proj", "blocks.{i}.attn.out"),
    ("transformer.h.{i}.ln_2", "blocks.{i}.norm2"),
    ("transformer.h.{i}.mlp.c_fc_0", "blocks.{i}.mlp.gate_up.gate"),
    ("transformer.h.{i}.mlp.c_fc_1", "blocks.{i}.mlp.gate_up.up"),
    ("transformer.h.{i}.mlp.c_proj", "blocks.{i}.mlp.down"),
    ("transformer.ln_f", "norm"),
    ("lm_head", "lm_head"),
)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    defaults = {"rope_theta": 500000.0, "layer_norm_epsilon": 1e-5, "attention_bias": False}
    sizes = {"num_hidden_layers": raw.get("num_layers"), "num_key_value_heads": 8, "max_position_embeddings": 4096}
    return {**defaults, **sizes, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=c.attention_bias, out_bias=c.attention_bias, mlp_bias=bool(c.mlp_bias))
