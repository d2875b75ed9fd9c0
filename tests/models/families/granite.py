"""Granite, dense."""

from tests.models.variant import Variant

SCALES = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.15,
}

VARIANTS = {
    "granite": Variant("Granite", {**SCALES, "tie_word_embeddings": True}),
    "granite-biases": Variant("Granite", {**SCALES, "attention_bias": True, "mlp_bias": True}),
    "granite-unscaled": Variant("Granite", {"num_key_value_heads": 1, "initializer_range": 0.1}),
}
