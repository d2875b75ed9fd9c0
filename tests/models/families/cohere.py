"""Cohere's Command models."""

from typing import Any

from tests.models.variant import Variant


def as_in_2024(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The words of transformers 4: a pattern in place of each layer's kind."""
    del config["layer_types"]
    config["sliding_window_pattern"] = 3
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]


LAYERS = {"num_hidden_layers": 4, "sliding_window": 24}

VARIANTS = {
    "cohere": Variant("Cohere"),
    "cohere-qk-norm": Variant("Cohere", {"use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": False}),
    "cohere-bias": Variant("Cohere", {"attention_bias": True, "use_qk_norm": True, "num_key_value_heads": 1}),
    "cohere2": Variant("Cohere2", LAYERS),
    "cohere2-2024": Variant(
        "Cohere2",
        LAYERS
        | {"attention_bias": True, "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2}
        | {"num_hidden_layers": 6},
        rewrite=as_in_2024,
    ),
}
