"""Hunyuan, dense."""

from typing import Any

from tests.models.variant import Variant

ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}


def release(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """RoPE as the released files spell it."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "dynamic", "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0}


def without_norms(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Without its norms a Hunyuan is a Llama; transformers' own class always has them."""
    config["architectures"], config["model_type"] = ["HunYuanDenseV1ForCausalLM"], "hunyuan_v1_dense"
    config["use_qk_norm"] = False


VARIANTS = {
    "hunyuan": Variant("HunYuanDenseV1", {"rope_parameters": ALPHA, "head_dim": 32, "tie_word_embeddings": True}),
    "hunyuan-release": Variant("HunYuanDenseV1", {"rope_parameters": ALPHA, "head_dim": 16}, rewrite=release),
    "hunyuan-bias": Variant("HunYuanDenseV1", {"head_dim": 16, "attention_bias": True, "num_key_value_heads": 4}),
    "hunyuan-no-norm": Variant("Llama", rewrite=without_norms),
}
