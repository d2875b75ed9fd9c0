"""BLOOM."""

from typing import Any

from tests.models.variant import Variant


def without_prefix(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The first checkpoints' names and words."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    config["n_embed"] = config.pop("hidden_size")
    config["num_attention_heads"] = config.pop("n_head")


SMALL = {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 199, "initializer_range": 0.3}

VARIANTS = {
    "bloom": Variant("Bloom", SMALL, common=False),
    "bloom-6-heads": Variant("Bloom", SMALL | {"hidden_size": 96, "n_head": 6}, common=False, rewrite=without_prefix),
    "bloom-untied": Variant("Bloom", SMALL | {"tie_word_embeddings": False}, common=False),
}
