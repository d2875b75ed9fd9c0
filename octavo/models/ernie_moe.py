"""ERNIE 4.5 with experts: in some layers these stand beside shared ones, chosen with a correction of the softmax
(Baidu, "ERNIE 4.5 technical report", 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE
from octavo.layers.views import Flat
from octavo.models import ernie
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import EXPERTS, SHARED_EXPERTS, Names, but
from octavo.ops.contract import Router

IGNORE = ("model.mtp_*",)
"""The layers that predict further tokens at once."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers takes where the config is silent."""
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "num_key_value_heads": 4}
    return {**defaults, "max_position_embeddings": 131072, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.raw.get("use_bias"):
        raise ModelConfigError("use_bias = true is not supported for ERNIE models with experts")
    first, every = c.number("moe_layer_start_index", 1), c.number("moe_layer_interval", 1, zero=False)
    last = c.layers - 1 if c.raw.get("moe_layer_end_index", -1) == -1 else c.number("moe_layer_end_index")
    router = Router(c.number("moe_k", 6), renormalize=True, floor=c.real("moe_norm_min", 1e-12))

    def mlp(i: int) -> GatedMLP | MoE:
        if not first <= i <= last or (i + 1) % every:
            return GatedMLP(c.hidden_size, c.intermediate_size, c.activation)
        inner = c.number("moe_intermediate_size", 1536)
        return MoE(
            c.hidden_size,
            inner,
            c.experts,
            router,
            c.activation,
            shared=c.number("moe_num_shared_experts", 2) * inner,
            correction=True,
        )

    return dense(c, max_model_len, bias=False, mlp=mlp)


def names(c: ModelConfig) -> Names:
    correction = "model.layers.{i}.mlp.moe_statics.e_score_correction_bias"
    return (
        *but(EXPERTS, (correction, "blocks.{i}.mlp.correction", Flat(1, in_gguf=False))),
        *SHARED_EXPERTS,
        *ernie.names(c),
    )
