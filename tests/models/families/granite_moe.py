"""Granite with mixtures of experts."""

from tests.models.variant import Variant

SMALL = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 4.0,
}

VARIANTS = {
    "granite-moe": Variant("GraniteMoe", {**SMALL, **MULTIPLIERS, "tie_word_embeddings": True}),
    "granite-moe-bias": Variant(
        "GraniteMoe", {**SMALL, "attention_multiplier": 0.25, "attention_bias": True, "num_key_value_heads": 4}
    ),
    "granite-moe-shared": Variant("GraniteMoeShared", {**SMALL, **MULTIPLIERS, "shared_intermediate_size": 64}),
    "granite-moe-shared-none": Variant("GraniteMoeShared", {**SMALL, **MULTIPLIERS, "shared_intermediate_size": 0}),
}
