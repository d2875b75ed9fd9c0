"""Gemma 3n: its text model alone, and as the models of all inputs store it."""

from __future__ import annotations

from typing import Any

from tests.models.variant import Variant

SLIDING, FULL = "sliding_attention", "full_attention"

SMALL = {
    "head_dim": 32,
    "num_hidden_layers": 5,
    "intermediate_size": [96, 96, 64, 96, 64],
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 24,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.7, 0.0, 0.5, 0.9, 0.0],
    "vocab_size_per_layer_input": 190,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "initializer_range": 0.15,
}


def scales(model: Any) -> None:
    """Routers see a mean over the width: at the size of this model they would hardly choose."""
    for layer in model.model.layers:
        layer.altup.modality_router.weight.mul_(30)


def published(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Inside the model of all inputs, in the words of its first release; with keys and values of every layer."""
    text = dict(config)
    text.pop("rope_parameters")
    text.update(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None)
    del text["architectures"]
    config.clear()
    config.update(architectures=["Gemma3nForConditionalGeneration"], model_type="gemma3n", text_config=text)
    for i in range(3, 5):
        for word in ("k_proj", "v_proj", "k_norm"):
            name = f"self_attn.{word}.weight"
            tensors[f"model.layers.{i}.{name}"] = tensors[f"model.layers.0.{name}"]
    norm = tensors["model.norm.weight"]
    for name in list(tensors):
        tensors[f"model.language_model.{name.removeprefix('model.')}"] = tensors.pop(name)
    for name in ("vision_tower.a.weight", "audio_tower.b.weight", "embed_vision.c.weight", "embed_audio.d.weight"):
        tensors[f"model.{name}"] = norm


VARIANTS = {
    "gemma3n": Variant("Gemma3n", SMALL, config="Gemma3nTextConfig", adjust=scales),
    "gemma3n-whole-table": Variant(
        "Gemma3n", {**SMALL, "vocab_size_per_layer_input": 199}, config="Gemma3nTextConfig", adjust=scales
    ),
    "gemma3n-published": Variant("Gemma3n", SMALL, config="Gemma3nTextConfig", adjust=scales, rewrite=published),
    "gemma3n-other": Variant(
        "Gemma3n",
        {
            **SMALL,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_kv_shared_layers": 0,
            "vocab_size_per_layer_input": 199,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 5.0,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 500.0},
                FULL: {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0},
            },
        },
        config="Gemma3nTextConfig",
        adjust=scales,
    ),
}
