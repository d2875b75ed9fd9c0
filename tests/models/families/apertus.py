"""Apertus."""

from typing import Any

from tests.models.variant import Variant

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def no_rope_said(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """RoPE as transformers takes it to be where the config has none."""
    del config["rope_parameters"]


VARIANTS = {
    "apertus": Variant("Apertus", {"rope_parameters": LLAMA3_ROPE}),
    "apertus-default-rope": Variant("Apertus", {"tie_word_embeddings": True}, rewrite=no_rope_said),
    "apertus-bias-relu2": Variant("Apertus", {"attention_bias": True, "hidden_act": "relu2"}),
}
