"""Mistral with and without a sliding window."""

from tests.models.variant import Variant

VARIANTS = {
    "mistral": Variant("Mistral", {"sliding_window": None}),
    "mistral-window": Variant("Mistral", {"sliding_window": 24, "head_dim": 32}),
}
