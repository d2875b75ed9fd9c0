"""MiniCPM, which transformers does not have.

It computes what a Granite does with the multipliers below: the embeddings times scale_emb, each branch times
scale_depth / sqrt(layers), the hidden rows before the head over hidden_size / dim_model_base (modeling_minicpm.py in
the repositories of the models)."""

from typing import Any

from tests.models.variant import Variant

SCALES = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 1.4 / 3**0.5,
    "logits_scaling": 64 / 48,
    "attention_multiplier": 16**-0.5,
}


def minicpm(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["architectures"], config["model_type"] = ["MiniCPMForCausalLM"], "minicpm"
    for key in SCALES:
        del config[key]
    config.update(scale_emb=12, scale_depth=1.4, dim_model_base=48)
    del config["rope_parameters"]
    if config["tie_word_embeddings"]:
        del config["tie_word_embeddings"]


VARIANTS = {
    "minicpm": Variant("Granite", {**SCALES, "tie_word_embeddings": True, "num_key_value_heads": 4}, rewrite=minicpm),
    "minicpm-untied": Variant("Granite", SCALES, rewrite=minicpm),
}
