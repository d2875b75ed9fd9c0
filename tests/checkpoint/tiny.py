"""Tiny models of each architecture, with random weights, as transformers makes them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def tiny(model_type: str, **changes: Any) -> Any:
    """A transformers model in float32."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
