"""Arcee AFM."""

from tests.models.variant import Variant

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}

VARIANTS = {
    "arcee": Variant("Arcee", {"rope_parameters": YARN}),
    "arcee-biases": Variant(
        "Arcee", {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
}
