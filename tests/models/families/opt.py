"""OPT."""

from typing import Any

from tests.models.variant import Variant


def without_prefix(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The first checkpoints' names; the tied head is stored too."""
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)
    tensors["lm_head.weight"] = tensors["decoder.embed_tokens.weight"]


SMALL = {"ffn_dim": 96}

VARIANTS = {
    "opt": Variant("OPT", SMALL),
    "opt-350m": Variant(
        "OPT", SMALL | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}, rewrite=without_prefix
    ),
    "galactica": Variant(
        "OPT",
        SMALL
        | {
            "activation_function": "gelu",
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
        },
    ),
    "opt-no-final-norm": Variant(
        "OPT", SMALL | {"_remove_final_layer_norm": True, "word_embed_proj_dim": 96, "initializer_range": 0.1}
    ),
}
