"""OLMo 1, 2 and 3."""

from typing import Any

from tests.models.variant import Variant

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
NESTED = {"full_attention": YARN, "sliding_attention": PLAIN}


def release(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """RoPE and layers as OLMo 3's released files spell them."""
    config["rope_scaling"] = config.pop("rope_parameters")["full_attention"]
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")
    del config["layer_types"]


VARIANTS = {
    "olmo": Variant("Olmo"),
    "olmo-clip": Variant("Olmo", {"clip_qkv": 0.5, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmo-bias": Variant("Olmo", {"attention_bias": True, "clip_qkv": 2.0}),
    "olmo2": Variant("Olmo2"),
    "olmo2-mha-bias-tied": Variant(
        "Olmo2", {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "olmo2-mqa": Variant("Olmo2", {"num_key_value_heads": 1, "rope_parameters": YARN}),
    "olmo3": Variant("Olmo3", {"num_hidden_layers": 5, "sliding_window": 16, "rope_parameters": NESTED}),
    "olmo3-release": Variant(
        "Olmo3", {"num_hidden_layers": 5, "sliding_window": 16, "rope_parameters": NESTED}, rewrite=release
    ),
}
