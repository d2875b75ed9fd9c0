"""Qwen 1.5 and 2 MoE: Qwen 2 with mixtures of experts, each beside a shared expert behind a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import EXPERTS, LLAMA
from octavo.ops.contract import Router

NAMES = (
    *EXPERTS,
    ("model.layers.{i}.mlp.shared_expert.{gate,up}_proj", "blocks.{i}.mlp.shared.gate_up.{gate,up}"),
    ("model.layers.{i}.mlp.shared_expert.down_proj", "blocks.{i}.mlp.shared.down"),
    ("model.layers.{i}.mlp.shared_expert_gate", "blocks.{i}.mlp.shared_gate"),
    *LLAMA,
)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Windows are off unless `use_sliding_window` is true; then every other layer below `max_window_layers` slides,
    unless `layer_types` says which (transformers 5)."""
    raw = {"max_position_embeddings": 32768, "num_key_value_heads": 16, **raw}
    if not raw.get("use_sliding_window"):
        return {**raw, "use_sliding_window": False}
    first = raw.get("max_window_layers", 28)
    kinds = [
        "sliding_attention" if i % 2 == 0 and i < first else "full_attention"
        for i in range(raw.get("num_hidden_layers") or 0)
    ]
    return {"sliding_window": 4096, **raw, "layer_types": raw.get("layer_types") or kinds}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    router = Router(c.number("num_experts_per_tok", 4), renormalize=bool(c.raw.get("norm_topk_prob")))

    def mlp(i: int) -> GatedMLP | MoE:
        if not sparse(c, i):
            return GatedMLP(c.hidden_size, c.intermediate_size, c.activation)
        return MoE(
            c.hidden_size,
            c.number("moe_intermediate_size", 1408),
            c.experts,
            router,
            c.activation,
            shared=c.number("shared_expert_intermediate_size", 5632),
            shared_gate=True,
        )

    return dense(c, max_model_len, bias=bool(c.raw.get("qkv_bias", True)), mlp=mlp)


def sparse(c: ModelConfig, i: int) -> bool:
    """Whether layer i has experts: every `decoder_sparse_step`th, but those of `mlp_only_layers`."""
    if i in (c.raw.get("mlp_only_layers") or ()) or not c.experts:
        return False
    return (i + 1) % c.number("decoder_sparse_step", 1, zero=False) == 0
