"""gpt-oss, its experts in bfloat16's layout. The published one is in `tests.models.test_mxfp4`."""

from __future__ import annotations

from typing import Any

from tests.models.variant import Variant

SMALL = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


def biases(model: Any) -> None:
    """Move the experts' biases and weights: clamped products must reach their limits."""
    import torch

    for layer in model.model.layers:
        experts = layer.mlp.experts
        experts.gate_up_proj_bias.copy_(torch.randn_like(experts.gate_up_proj_bias) * 3)
        experts.down_proj_bias.copy_(torch.randn_like(experts.down_proj_bias) * 0.2)


def published(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """gpt-oss's own words, the defaults left out."""
    rope = config.pop("rope_parameters")
    config.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    for key in ("layer_types", "attention_bias", "swiglu_alpha", "swiglu_limit"):
        config.pop(key, None)


VARIANTS = {
    "gpt-oss": Variant("GptOss", {**SMALL, "rope_parameters": YARN, "tie_word_embeddings": False}, adjust=biases),
    "gpt-oss-published": Variant("GptOss", {**SMALL, "rope_parameters": YARN}, adjust=biases, rewrite=published),
    "gpt-oss-full-tied": Variant(
        "GptOss",
        {
            **SMALL,
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": False,
            "num_key_value_heads": 4,
            "swiglu_limit": 3.0,
            "tie_word_embeddings": True,
        },
        adjust=biases,
    ),
}
