"""StarCoder 2."""

from tests.models.variant import Variant

VARIANTS = {
    "starcoder2": Variant("Starcoder2"),
    "starcoder2-window": Variant(
        "Starcoder2", {"sliding_window": 24, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"}
    ),
}
