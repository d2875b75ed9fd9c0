"""Llama 4: its text model alone, and as the models of images and text store it."""

from __future__ import annotations

from typing import Any

from tests.models.families.llama import LLAMA3_ROPE
from tests.models.variant import Variant

SMALL = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "attention_chunk_size": 32,
    "floor_scale": 16,
    "attn_scale": 0.4,
    "initializer_range": 0.15,
    "rope_parameters": LLAMA3_ROPE,
}


def published(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Inside the model of images and text, in the words of its first release."""
    text = dict(config)
    rope = text.pop("rope_parameters")
    text.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope, no_rope_layers=[], attn_temperature_tuning=4)
    for key in ("layer_types", "moe_layers", "architectures"):
        text.pop(key)
    config.clear()
    config.update(architectures=["Llama4ForConditionalGeneration"], model_type="llama4", text_config=text)
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)
    for name in ("vision_model.class_embedding", "multi_modal_projector.linear_1.weight"):
        tensors[name] = tensors["language_model.model.norm.weight"]


VARIANTS = {
    "llama4": Variant("Llama4", SMALL, config="Llama4TextConfig"),
    "llama4-release": Variant(
        "Llama4",
        {
            **SMALL,
            "attention_chunk_size": 8192,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "interleave_moe_layer_step": 2,
            "tie_word_embeddings": False,
        },
        config="Llama4TextConfig",
    ),
    "llama4-published": Variant("Llama4", SMALL, config="Llama4TextConfig", rewrite=published),
    "llama4-every-second": Variant(
        "Llama4",
        {
            **SMALL,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 2,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0, 1, 1],
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        config="Llama4TextConfig",
    ),
    "llama4-unchunked": Variant(
        "Llama4",
        {**SMALL, "attention_chunk_size": None, "num_key_value_heads": 4, "rope_parameters": {"rope_theta": 5e5}},
        config="Llama4TextConfig",
    ),
}
