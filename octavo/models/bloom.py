"""BLOOM: ALiBi, a norm on the embeddings, layer norms and plain MLPs with biases; q, k and v of a head lie together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.alibi import alibi_slopes
from octavo.layers.attention import Attention
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.views import grouped
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import Names, Row

WORDS = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "seq_length": "max_position_embeddings",
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = in_common_words(
        raw, {"tie_word_embeddings": True, "hidden_act": "gelu_new", "layer_norm_epsilon": 1e-5}, WORDS
    )
    out["intermediate_size"] = 4 * (out.get("hidden_size") or 0)
    return out


def names(c: ModelConfig) -> Names:
    """The first checkpoints hold the model without its head, and name tensors from there. GGUF files hold all queries,
    then keys, then values."""
    qkv = grouped(c.heads, c.heads, c.head_dim, in_gguf=False)
    rows: tuple[Row, ...] = (
        ("word_embeddings", "embed"),
        ("word_embeddings_layernorm", "embed_norm"),
        ("h.{i}.input_layernorm", "blocks.{i}.norm1"),
        ("h.{i}.self_attention.query_key_value", "blocks.{i}.attn.qkv", qkv),
        ("h.{i}.self_attention.dense", "blocks.{i}.attn.out"),
        ("h.{i}.post_attention_layernorm", "blocks.{i}.norm2"),
        ("h.{i}.mlp.dense_h_to_4h", "blocks.{i}.mlp.up"),
        ("h.{i}.mlp.dense_4h_to_h", "blocks.{i}.mlp.down"),
        ("ln_f", "norm"),
    )
    return (*((f"transformer.{row[0]}", *row[1:]) for row in rows), *rows, ("lm_head", "lm_head"))


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.raw.get("apply_residual_connection_post_layernorm"):
        raise ModelConfigError("apply_residual_connection_post_layernorm = true: such a residual is not supported")

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention.multi_head,
                None,
                alibi=alibi_slopes(c.heads),
                bias=True,
                out_bias=True,
            ),
            norm2=norm(),
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation),
        )

    return Decoder(c, block, norm(), embed_norm=norm())
