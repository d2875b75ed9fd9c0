"""Llama and what says it is one."""

from tests.models.variant import Variant

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}

VARIANTS = {
    "llama": Variant("Llama", {"tie_word_embeddings": False}),
    "llama-mha-bias": Variant("Llama", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "llama-mqa": Variant("Llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "llama-head-dim": Variant("Llama", {"head_dim": 32}),
    "llama-rope-llama3": Variant("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": Variant(
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
    ),
    "llama-rope-yarn": Variant("Llama", {"rope_parameters": YARN_ROPE}),
}
