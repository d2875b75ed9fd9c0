"""GLM 4.5 and 4.6: heads that are rotated in part, and after some dense layers experts beside a shared one, chosen by
corrected sigmoids (GLM-4.5 team, "GLM-4.5: Agentic, reasoning, and coding foundation models", 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import EXPERTS, LLAMA, QK_NORM, SHARED_EXPERTS
from octavo.ops.contract import Router

NAMES = (*EXPERTS, *SHARED_EXPERTS, *LLAMA, *QK_NORM)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers takes where the config is silent."""
    defaults = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "num_key_value_heads": 8}
    return {**defaults, "max_position_embeddings": 131072, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    first = c.number("first_k_dense_replace", 1)
    router = Router(
        c.number("num_experts_per_tok", 8),
        "sigmoid",
        renormalize=bool(c.raw.get("norm_topk_prob", True)),
        groups=c.number("n_group", 1),
        top_groups=c.number("topk_group", 1),
        group_score="top2",
        scale=c.real("routed_scaling_factor", 1.0),
        eps=1e-20,
    )

    def mlp(i: int) -> GatedMLP | MoE:
        if i < first:
            return GatedMLP(c.hidden_size, c.intermediate_size, c.activation)
        inner = c.number("moe_intermediate_size", 1408)
        return MoE(
            c.hidden_size,
            inner,
            c.experts,
            router,
            c.activation,
            shared=c.number("n_shared_experts", 1) * inner,
            correction=True,
        )

    return dense(c, max_model_len, bias=bool(c.attention_bias), qk_norm=bool(c.raw.get("use_qk_norm")), mlp=mlp)


def ignore(c: ModelConfig) -> tuple[str, ...]:
    """The layers after the last, which predict further tokens at once."""
    last = c.layers + c.number("num_nextn_predict_layers", 0)
    return tuple(f"model.layers.{i}.*" for i in range(c.layers, last))
