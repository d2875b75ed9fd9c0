"""Helium."""

from tests.models.variant import Variant

VARIANTS = {
    "helium": Variant("Helium", {"head_dim": 16, "num_key_value_heads": 4}),
    "helium-grouped-bias-tied": Variant(
        "Helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
}
