"""Qwen, dense."""

from tests.models.variant import Variant

VARIANTS = {
    "qwen2": Variant("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": Variant("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": Variant("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
