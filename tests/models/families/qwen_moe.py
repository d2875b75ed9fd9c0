"""Qwen with mixtures of experts."""

from typing import Any

from tests.models.variant import Variant

QWEN2 = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
QWEN3 = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 16}


def without_layer_types(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    del config["layer_types"]


def first_release(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The words of Qwen3-30B-A3B's config: windows are named, but off."""
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    config["num_experts"] = config.pop("num_local_experts")
    config.update(sliding_window=16, max_window_layers=3, rope_scaling=None)
    del config["use_sliding_window"]


VARIANTS = {
    "qwen2-moe": Variant("Qwen2Moe", {**QWEN2, "num_key_value_heads": 4}),
    "qwen2-moe-some-layers": Variant(
        "Qwen2Moe",
        {
            **QWEN2,
            **SLIDING,
            "num_hidden_layers": 4,
            "max_window_layers": 3,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
        rewrite=without_layer_types,
    ),
    "qwen3-moe": Variant("Qwen3Moe", {**QWEN3, "norm_topk_prob": True}, rewrite=first_release),
    "qwen3-moe-some-layers": Variant(
        "Qwen3Moe",
        {
            **QWEN3,
            **SLIDING,
            "max_window_layers": 2,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}
