"""Phi, dense: 1 to 2, and 3 to 4."""

from typing import Any

from tests.models.variant import Variant


def longrope(rotated: int, original: int) -> dict[str, Any]:
    """Parameters whose original context is shorter or longer than every length tested: long or short factors rule."""
    half = rotated // 2
    return {
        "original_max_position_embeddings": original,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + i / 40 for i in range(half)],
            "long_factor": [2.0 + i / 2 for i in range(half)],
            "partial_rotary_factor": rotated / 16,
        },
    }


def as_in_2024(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The words of Phi-3's first files."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}


VARIANTS = {
    "phi": Variant("Phi", {"num_key_value_heads": 4}),
    "phi-gqa": Variant(
        "Phi",
        {"hidden_act": "gelu", "rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 0.25}},
    ),
    "phi3": Variant("Phi3", {"num_key_value_heads": 4}),
    "phi3-window": Variant("Phi3", {"sliding_window": 24, "tie_word_embeddings": True}),
    "phi3-long": Variant("Phi3", longrope(16, 32)),
    "phi3-short": Variant("Phi3", longrope(16, 512) | {"max_position_embeddings": 2048}),
    "phi3-2024": Variant("Phi3", longrope(16, 32), rewrite=as_in_2024),
    "phi4-mini": Variant("Phi3", longrope(12, 32) | {"tie_word_embeddings": True}),
}
