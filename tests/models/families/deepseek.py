"""DeepSeek V2 and V3, and what says it is one. Kimi K2's published config names an architecture of its own."""

from __future__ import annotations

from typing import Any

from tests.models.variant import Variant

SMALL = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "initializer_range": 0.2,
}
V2 = {**SMALL, "first_k_dense_replace": 1, "n_shared_experts": 2, "tie_word_embeddings": False}
V3 = {**V2, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}


def corrections(model: Any) -> None:
    """Move the routers' corrections, which start at 0."""
    import torch

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.copy_(torch.randn_like(layer.mlp.gate.e_score_correction_bias))


def every_second(model: Any) -> None:
    """Experts in layers 2, 4, … only: transformers has no word for it, but runs such a model."""
    corrections(model)
    layers, c = model.model.layers, model.config
    layers[1].mlp = type(layers[0].mlp)(c).eval()
    for parameter in layers[1].mlp.parameters():
        parameter.normal_(0, c.initializer_range)


def published(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """DeepSeek-V3's own words, and tensors of the layer that predicts two tokens at once."""
    rope = config.pop("rope_parameters")
    config.update(
        rope_theta=rope.pop("rope_theta"),
        rope_scaling={("type" if key == "rope_type" else key): value for key, value in rope.items()},
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        moe_layer_freq=1,
        num_nextn_predict_layers=1,
    )
    for key in ("head_dim", "qk_head_dim", "num_mtp_layers", "rope_interleave"):
        config.pop(key, None)
    for name in ("enorm.weight", "eh_proj.weight", "embed_tokens.weight"):
        tensors[f"model.layers.3.{name}"] = tensors["model.embed_tokens.weight"]


def sparse_config(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["moe_layer_freq"] = 2


def kimi(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    published(config, tensors)
    config["architectures"] = ["KimiK2ForCausalLM"]


VARIANTS = {
    "deepseek-v2": Variant("DeepseekV2", V2),
    "deepseek-v2-lite-yarn": Variant("DeepseekV2", {**V2, "q_lora_rank": None, "rope_parameters": YARN}),
    "deepseek-v2-groups": Variant(
        "DeepseekV2",
        {
            **V2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
            "attention_bias": True,
        },
    ),
    "deepseek-v3": Variant("DeepseekV3", V3, adjust=corrections),
    "deepseek-v3-yarn": Variant(
        "DeepseekV3",
        {**V3, "rope_parameters": {**YARN, "mscale": 0.9}, "routed_scaling_factor": 1.5},
        adjust=corrections,
    ),
    "deepseek-v3-published": Variant(
        "DeepseekV3", {**V3, "rope_parameters": YARN}, adjust=corrections, rewrite=published
    ),
    "deepseek-v3-halves": Variant(
        "DeepseekV3",
        {**V3, "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False, "tie_word_embeddings": True},
        adjust=corrections,
    ),
    "deepseek-v3-every-second": Variant("DeepseekV3", V3, adjust=every_second, rewrite=sparse_config),
    "kimi-k2": Variant(
        "DeepseekV3",
        {**V3, "n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_parameters": YARN},
        adjust=corrections,
        rewrite=kimi,
    ),
}
