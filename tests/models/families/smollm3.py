"""SmolLM3: layers that do not rotate, by an interval or a list, and with windows."""

from typing import Any

from tests.models.variant import Variant


def spare(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Only what transformers 4 wrote, which left out values equal to the defaults."""
    del config["layer_types"], config["no_rope_layers"], config["tie_word_embeddings"]
    del config["rope_parameters"], config["use_sliding_window"]


VARIANTS = {
    "smollm3": Variant("SmolLM3", {"num_hidden_layers": 5}),
    "smollm3-spare": Variant("SmolLM3", {"num_hidden_layers": 4}, rewrite=spare),
    "smollm3-window": Variant(
        "SmolLM3",
        {
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
    ),
}
