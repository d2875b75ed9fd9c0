"""Ministral (2024) and Ministral 3."""

from tests.models.variant import Variant

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}

VARIANTS = {
    "ministral": Variant("Ministral", {"sliding_window": 16, "head_dim": 32}),
    "ministral-mixed": Variant(
        "Ministral",
        {
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "head_dim": 16,
            "tie_word_embeddings": True,
        },
    ),
    "ministral3": Variant("Ministral3", {"head_dim": 32, "rope_parameters": ROPE, "initializer_range": 0.2}),
    "ministral3-window": Variant(
        "Ministral3",
        {
            "head_dim": 16,
            "sliding_window": 16,
            "rope_parameters": {**ROPE, "mscale": 1.2, "mscale_all_dim": 0.8},
            "tie_word_embeddings": True,
        },
    ),
}
