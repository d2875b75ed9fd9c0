"""Llama and what says it is one."""

from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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

DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 20 for i in range(8)],
    "long_factor": [3.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}


def fixed(model: Any) -> None:
    """RoPE that transformers computes anew for every length stays what it is at 512 tokens, as a device has it whose
    max_model_len is 512."""
    rotary = model.model.rotary_emb
    frequencies, rotary.attention_scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](model.config, "cpu", seq_len=512)
    rotary.inv_freq.copy_(frequencies)
    rotary.rope_type = "default"


def old_spelling(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """RoPE as the first transformers to scale it spelled it."""
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = (
        rope["rope_theta"],
        {"type": rope["rope_type"], "factor": rope["factor"]},
    )


VARIANTS = {
    "llama": Variant("Llama", {"tie_word_embeddings": False}),
    "llama-mha-bias": Variant("Llama", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}),
    "llama-mqa": Variant("Llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    "llama-head-dim": Variant("Llama", {"head_dim": 32}),
    "llama-rope-llama3": Variant("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": Variant(
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}
    ),
    "llama-rope-old-spelling": Variant(
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}},
        rewrite=old_spelling,
    ),
    "llama-mlp-bias": Variant("Llama", {"mlp_bias": True}),
    "llama-rope-dynamic": Variant("Llama", {"rope_parameters": DYNAMIC_ROPE}),
    "llama-rope-dynamic-stretched": Variant(
        "Llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 64}, adjust=fixed
    ),
    "llama-rope-long-short": Variant(
        "Llama", {"rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 512, "factor": 2.0}}
    ),
    "llama-rope-long": Variant("Llama", {"rope_parameters": LONG_ROPE}, adjust=fixed),
    "llama-rope-long-factor": Variant(
        "Llama", {"rope_parameters": {**LONG_ROPE, "attention_factor": 1.3}}, adjust=fixed
    ),
    "llama-rope-yarn": Variant("Llama", {"rope_parameters": YARN_ROPE}),
    "llama-rope-yarn-mscale": Variant(
        "Llama",
        {
            "rope_parameters": {**YARN_ROPE, "mscale": 1.4, "mscale_all_dim": 0.6, "beta_fast": 16},
            "initializer_range": 0.2,
        },
    ),
    "llama-rope-yarn-untruncated": Variant("Llama", {"rope_parameters": {**YARN_ROPE, "truncate": False}}),
    "llama-rope-yarn-factor": Variant(
        "Llama", {"rope_parameters": {**YARN_ROPE, "attention_factor": 0.8, "beta_slow": 2}}
    ),
}
