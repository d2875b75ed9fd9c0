"""Command R and R+ (Cohere) and Command R7B and A (Cohere 2): attention and MLP side by side behind one layer norm
without bias, rotation of neighbouring pairs, scaled logits. Cohere 2 slides in three layers of four; the fourth sees
all and does not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.layers.views import Rows, interleaved
from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA, Names

DEFAULTS = {
    "tie_word_embeddings": True,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    if "Cohere2ForCausalLM" in (raw.get("architectures") or ()):
        return in_common_words(raw, {**DEFAULTS, "sliding_window": 4096})
    return in_common_words(raw, {**DEFAULTS, "rope_theta": 500000.0}) | {"sliding_window": None}


class _NormRows(Rows):
    """A weight per head and value, [heads, head_dim], in the order of `interleaved`."""

    def __init__(self, heads: int, head_dim: int):
        super().__init__(interleaved(heads, head_dim).order, heads * head_dim)
        self.heads = heads

    def shape(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return (self.heads, wanted[0] // self.heads)


def names(c: ModelConfig) -> Names:
    q, k = interleaved(c.heads, c.head_dim), interleaved(c.kv_heads, c.head_dim)
    return (
        ("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attn.qkv.q", q),
        ("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attn.qkv.k", k),
        ("model.layers.{i}.self_attn.q_norm", "blocks.{i}.attn.q_norm", _NormRows(c.heads, c.head_dim)),
        ("model.layers.{i}.self_attn.k_norm", "blocks.{i}.attn.k_norm", _NormRows(c.kv_heads, c.head_dim)),
        *LLAMA,
    )


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    second = c.architecture == "Cohere2ForCausalLM"
    qk_norm = bool(c.raw.get("use_qk_norm")) and not second
    windows = c.windows
    if second and c.raw.get("layer_types") is None:
        every = c.number("sliding_window_pattern", 4)
        windows = tuple(window if (i + 1) % every else 0 for i, window in enumerate(windows))
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def block(i: int) -> Block:
        return Block(
            norm1=LayerNorm(c.hidden_size, c.eps),
            attn=Attention(
                c.attention,
                None if second and not windows[i] else rope,
                window=windows[i],
                bias=c.attention_bias,
                out_bias=c.attention_bias,
                q_norm=LayerNorm(c.heads * c.head_dim, c.eps) if qk_norm else None,
                k_norm=LayerNorm(c.kv_heads * c.head_dim, c.eps) if qk_norm else None,
            ),
            norm2=None,
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
            parallel=True,
        )

    return Decoder(c, block, LayerNorm(c.hidden_size, c.eps), logit_scale=c.real("logit_scale"))
