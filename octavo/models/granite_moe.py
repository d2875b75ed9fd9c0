"""Granite 3 MoE: Granite with mixtures of experts, some beside a shared MLP (IBM, "Granite 3.0 language models",
2024)."""

from __future__ import annotations

from octavo.layers.moe import MoE
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import EXPERTS, LLAMA, SHARED_EXPERTS
from octavo.ops.contract import Router

NAMES = (
    *(row for row in LLAMA if ".mlp." not in row[0]),
    ("model.layers.{i}.block_sparse_moe.router.layer", "blocks.{i}.mlp.router"),
    ("model.layers.{i}.block_sparse_moe.input_linear", "blocks.{i}.mlp.gate_up.{e}"),
    ("model.layers.{i}.block_sparse_moe.output_linear", "blocks.{i}.mlp.down.{e}"),
    ("model.layers.{i}.shared_mlp.input_linear", "blocks.{i}.mlp.shared.gate_up"),
    ("model.layers.{i}.shared_mlp.output_linear", "blocks.{i}.mlp.shared.down"),
    *EXPERTS,
    *SHARED_EXPERTS,
)
"""The last two are for GGUF files."""


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    embedding, branch, scores, logits = (
        c.real(key, 1.0, zero=False)
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    router = Router(c.number("num_experts_per_tok", 2), renormalize=True, scale=branch)
    shared = c.number("shared_intermediate_size", 0) if c.architecture == "GraniteMoeSharedForCausalLM" else 0

    def mlp(i: int) -> MoE:
        sizes = (c.hidden_size, c.intermediate_size, c.experts)
        return MoE(*sizes, router, c.activation, shared=shared, shared_scale=branch)

    return dense(
        c,
        max_model_len,
        bias=bool(c.attention_bias),
        out_bias=bool(c.attention_bias),
        mlp=mlp,
        attention_scale=scores,
        residual_scale=branch,
        embed_scale=embedding,
        logit_scale=1.0 / logits,
    )
