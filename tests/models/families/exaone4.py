"""EXAONE 4, with and without windows."""

from typing import Any

from tests.models.variant import Variant


def letters(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The pattern as the released 32B model spells it, here without layer_types."""
    del config["layer_types"]
    config["sliding_window_pattern"] = "LLLG"


WINDOWED = {"num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 4}

VARIANTS = {
    "exaone4": Variant("Exaone4", WINDOWED),
    "exaone4-letters": Variant("Exaone4", {**WINDOWED, "tie_word_embeddings": True}, rewrite=letters),
    "exaone4-global": Variant(
        "Exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "num_key_value_heads": 4, "head_dim": 32},
    ),
}
