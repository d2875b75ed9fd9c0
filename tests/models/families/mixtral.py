"""Mixtral, and Phi-3.5-MoE, whose files have the same names."""

from typing import Any

from tests.models.variant import Variant

PHI = {"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.1}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.25 * i for i in range(8)],
    "long_factor": [1.5 + 0.5 * i for i in range(8)],
    "short_mscale": 1.1,
    "long_mscale": 1.25,
    "factor": 32.0,
    "original_max_position_embeddings": 512,
}
SHORT = {**LONGROPE, "original_max_position_embeddings": 16}


def first_release(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """RoPE as transformers 4 spells it."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]


def published(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The name and the spelling of Phi-3.5-MoE's own code, for a model beyond its original context.

    That code takes the long factors there. transformers 5.24 takes `long_mscale` but the short factors, so what it ran
    with as short ones is called long here.
    """
    rope = config.pop("rope_parameters")
    config["architectures"] = ["PhiMoEForCausalLM"]
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {
        "type": "longrope",
        "short_factor": [7.0] * 8,
        "long_factor": rope["short_factor"],
        "short_mscale": 3.0,
        "long_mscale": rope["long_mscale"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
    }


VARIANTS = {
    "mixtral": Variant("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "initializer_range": 0.25}),
    "mixtral-window": Variant(
        "Mixtral",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        },
        rewrite=first_release,
    ),
    "phimoe": Variant("Phimoe", {**PHI, "rope_parameters": LONGROPE}),
    "phimoe-plain": Variant(
        "Phimoe", {"num_local_experts": 4, "num_key_value_heads": 4, "sliding_window": 20, "tie_word_embeddings": True}
    ),
    "phimoe-published": Variant(
        "Phimoe", {**PHI, "rope_parameters": SHORT, "initializer_range": 0.25}, rewrite=published
    ),
}
