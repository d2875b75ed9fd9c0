"""Nemotron and Minitron."""

from typing import Any

from tests.models.variant import Variant


def release(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """RoPE as transformers 4 spelled it."""
    rope = config.pop("rope_parameters")
    config["rope_theta"], config["partial_rotary_factor"] = rope["rope_theta"], rope["partial_rotary_factor"]


def by_default(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Half of each head, unsaid."""
    del config["rope_parameters"]


GENTLE = {"initializer_range": 0.2}
"""ReLU squared makes large logits, whose rounding alone would exceed the tolerance."""

VARIANTS = {
    "nemotron": Variant("Nemotron", GENTLE, rewrite=by_default),
    "nemotron-biases": Variant(
        "Nemotron",
        {**GENTLE, "attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True},
    ),
    "nemotron-quarter": Variant(
        "Nemotron",
        {**GENTLE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        rewrite=release,
    ),
}
