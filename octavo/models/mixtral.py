"""Mixtral 8x7B and 8x22B: Mistral with a mixture of experts in place of every MLP (Jiang et al., "Mixtral of experts",
2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.moe import MoE
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import EXPERTS, LLAMA
from octavo.ops.contract import Router

NAMES = (
    ("model.layers.{i}.block_sparse_moe.gate", "blocks.{i}.mlp.router"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w1", "blocks.{i}.mlp.gate_up.{e}.gate"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w3", "blocks.{i}.mlp.gate_up.{e}.up"),
    ("model.layers.{i}.block_sparse_moe.experts.{e}.w2", "blocks.{i}.mlp.down.{e}"),
    *EXPERTS,
    *LLAMA,
)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What transformers takes where the config is silent."""
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072, "num_key_value_heads": 8}
    return {**defaults, **raw}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    router = Router(c.number("num_experts_per_tok", 2), renormalize=True)

    def mlp(i: int) -> MoE:
        return MoE(c.hidden_size, c.intermediate_size, c.experts, router, c.activation)

    return dense(c, max_model_len, bias=False, mlp=mlp)
