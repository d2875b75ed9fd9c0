"""ERNIE 4.5, dense."""

from typing import Any

from tests.models.variant import Variant


def first_release(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The name and spelling of the first release, values equal to the defaults left out."""
    config["architectures"] = ["Ernie4_5_ForCausalLM"]
    del config["rope_parameters"], config["tie_word_embeddings"], config["use_bias"]


VARIANTS = {
    "ernie": Variant("Ernie4_5", {"head_dim": 32, "tie_word_embeddings": False}),
    "ernie-first-release": Variant("Ernie4_5", {"head_dim": 32}, rewrite=first_release),
    "ernie-bias": Variant(
        "Ernie4_5", {"head_dim": None, "use_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}
    ),
}
