"""OLMoE."""

from tests.models.variant import Variant

SMALL = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}

VARIANTS = {
    "olmoe": Variant("Olmoe", {**SMALL, "num_key_value_heads": 4}),
    "olmoe-clipped": Variant(
        "Olmoe",
        {**SMALL, "clip_qkv": 0.7, "norm_topk_prob": True, "attention_bias": True, "tie_word_embeddings": True},
    ),
}
