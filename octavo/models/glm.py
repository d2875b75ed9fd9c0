"""GLM-4 (2024): Llama with a bias on q, k and v, gate and up in one matrix, and the first half of each head rotated in
neighbouring pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.rope import rotated_size
from octavo.layers.views import beside, interleaved, part
from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import LLAMA, Names

DEFAULTS = {
    "attention_bias": True,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return in_common_words(raw, DEFAULTS)


def names(c: ModelConfig) -> Names:
    rotated = rotated_size(c.rope, c.head_dim)
    q, k = interleaved(c.heads, c.head_dim, rotated), interleaved(c.kv_heads, c.head_dim, rotated)
    attn = "model.layers.{i}.self_attn."
    return (
        (attn + "q_proj", "blocks.{i}.attn.qkv.q", q),
        (attn + "k_proj", "blocks.{i}.attn.qkv.k", k),
        (attn + "qkv_proj", "blocks.{i}.attn.qkv", beside([q, k, part(0, k.total, k.total)])),  # ChatGLM's GGUF files
        ("model.layers.{i}.mlp.gate_up_proj", "blocks.{i}.mlp.gate_up"),
        *(row for row in LLAMA if "gate_up" not in row[1]),
    )


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    return dense(c, max_model_len, bias=c.attention_bias)
