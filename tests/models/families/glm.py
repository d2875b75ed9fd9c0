"""GLM-4, dense."""

from typing import Any

from tests.models.variant import Variant


def as_in_2024(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The words of transformers 4; what equals the class's default is left out."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    for key in ("rms_norm_eps", "attention_bias"):
        del config[key]


VARIANTS = {
    "glm": Variant("Glm", {"head_dim": 32, "initializer_range": 0.2}),
    "glm-no-bias": Variant(
        "Glm",
        {
            "head_dim": 16,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "glm-2024": Variant("Glm", {"head_dim": 16}, rewrite=as_in_2024),
    "glm4": Variant("Glm4", {"head_dim": 32, "attention_bias": False}),
    "glm4-bias": Variant("Glm4", {"head_dim": 16, "num_key_value_heads": 4}),
}
