"""Gemma, dense."""

from tests.models.variant import Variant

VARIANTS = {
    "gemma": Variant("Gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma-bias-gelu": Variant(
        "Gemma", {"head_dim": 16, "attention_bias": True, "hidden_act": "gelu", "tie_word_embeddings": False}
    ),
    "gemma2": Variant("Gemma2", {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24}),
    "gemma2-scale": Variant("Gemma2", {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}),
    "gemma2-no-caps": Variant(
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
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
