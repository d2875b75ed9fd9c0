"""StableLM."""

from tests.models.variant import Variant

VARIANTS = {
    "stablelm": Variant("StableLm", {"num_key_value_heads": 4}),
    "stablelm-parallel": Variant(
        "StableLm", {"use_parallel_residual": True, "qk_layernorm": True, "tie_word_embeddings": True}
    ),
    "stablelm-bias": Variant(
        "StableLm",
        {
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
}
