"""GLM 4.5 with mixtures of experts."""

from typing import Any

from tests.models.variant import Variant

SMALL = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 32,
    "num_nextn_predict_layers": 0,
}


def corrections(model: Any) -> None:
    """Move the routers' corrections, which start at 0: enough to change choices."""
    import torch

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            bias = layer.mlp.gate.e_score_correction_bias
            bias.copy_(torch.randn_like(bias) * 0.3)


def published(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The spelling of GLM-4.5's own files, with tensors of the layer that predicts two tokens at once."""
    rope = config.pop("rope_parameters")
    config.update(
        rope_theta=rope["rope_theta"],
        partial_rotary_factor=rope["partial_rotary_factor"],
        rope_scaling=None,
        num_nextn_predict_layers=1,
    )
    layers = config["num_hidden_layers"]
    for name in ("enorm.weight", "eh_proj.weight", "embed_tokens.weight", "mlp.experts.0.up_proj.weight"):
        tensors[f"model.layers.{layers}.{name}"] = tensors["model.norm.weight"]


VARIANTS = {
    "glm4-moe": Variant("Glm4Moe", SMALL, adjust=corrections),
    "glm4-moe-published": Variant(
        "Glm4Moe",
        {
            **SMALL,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 2.5,
            "partial_rotary_factor": 0.25,
        },
        adjust=corrections,
        rewrite=published,
    ),
    "glm4-moe-groups": Variant(
        "Glm4Moe",
        {
            **SMALL,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
        adjust=corrections,
    ),
}
