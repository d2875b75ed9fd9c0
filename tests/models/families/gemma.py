"""Gemma, dense."""

from tests.models.variant import Variant

VARIANTS = {
    "gemma3": Variant(
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        },
        config="Gemma3TextConfig",
    ),
    "gemma3-period": Variant(
        "Gemma3",
        {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 7, "query_pre_attn_scalar": 16},
        config="Gemma3TextConfig",
    ),
}
