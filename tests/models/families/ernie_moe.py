"""ERNIE 4.5 with mixtures of experts."""

from typing import Any

from tests.models.variant import Variant

SMALL = {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "head_dim": 16}


def corrections(model: Any) -> None:
    """Move the routers' corrections, which start at 0: enough to change choices."""
    import torch

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            statics = layer.mlp.gate.moe_statics
            statics.e_score_correction_bias.copy_(torch.randn_like(statics.e_score_correction_bias) * 0.2)


def first_release(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The name and spelling of the first release, with tensors of layers that predict further tokens."""
    config["architectures"] = ["Ernie4_5_MoEForCausalLM"]
    config["moe_layer_end_index"] = -1
    del config["rope_parameters"], config["tie_word_embeddings"], config["use_bias"]
    for name in ("mtp_emb_norm.0.weight", "mtp_block.0.input_layernorm.weight"):
        tensors[f"model.{name}"] = tensors["model.norm.weight"]


VARIANTS = {
    "ernie-moe": Variant("Ernie4_5_Moe", {**SMALL, "tie_word_embeddings": False}, adjust=corrections),
    "ernie-moe-first-release": Variant("Ernie4_5_Moe", SMALL, adjust=corrections, rewrite=first_release),
    "ernie-moe-some-layers": Variant(
        "Ernie4_5_Moe",
        {
            **SMALL,
            "head_dim": 32,
            "num_hidden_layers": 6,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "moe_norm_min": 0.8,
            "num_key_value_heads": 4,
            "initializer_range": 0.25,
        },
        adjust=corrections,
    ),
}
