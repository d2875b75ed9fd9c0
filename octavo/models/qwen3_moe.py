"""Qwen 3 MoE: Qwen 3 with mixtures of many small experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import EXPERTS, LLAMA, QK_NORM
from octavo.models.qwen2_moe import sparse
from octavo.ops.contract import Router

NAMES = (*EXPERTS, *LLAMA, *QK_NORM)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """With `use_sliding_window` all layers slide: unlike in Qwen 2, `max_window_layers` has no say."""
    defaults = {"max_position_embeddings": 32768, "num_key_value_heads": 4, "sliding_window": 4096}
    sliding = bool(raw.get("use_sliding_window"))
    return {**defaults, **raw, "use_sliding_window": sliding, "max_window_layers": None}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    router = Router(c.number("num_experts_per_tok", 8), renormalize=bool(c.raw.get("norm_topk_prob")))

    def mlp(i: int) -> GatedMLP | MoE:
        if not sparse(c, i):
            return GatedMLP(c.hidden_size, c.intermediate_size, c.activation)
        return MoE(c.hidden_size, c.number("moe_intermediate_size", 768), c.experts, router, c.activation)

    bias = bool(c.attention_bias)
    return dense(c, max_model_len, bias=bias, out_bias=bias, qk_norm=True, mlp=mlp)
