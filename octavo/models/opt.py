"""OPT and Galactica: learned positions that begin at row 2, layer norms, plain MLPs; OPT-350m norms after each branch,
and its embeddings are narrower than its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.linear import Layer, Positions
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import AnyBlock, AttentionLayer, Block, Decoder
from octavo.models.names import Row
from octavo.ops.contract import Array, Ops

_ROWS: tuple[Row, ...] = (
    ("decoder.embed_tokens", "embed"),
    ("decoder.embed_positions", "positions"),
    ("decoder.project_{in,out}", "project_{in,out}"),
    ("decoder.layers.{i}.self_attn_layer_norm", "blocks.{i}.norm1"),
    ("decoder.layers.{i}.self_attn.{q,k,v}_proj", "blocks.{i}.attn.qkv.{q,k,v}"),
    ("decoder.layers.{i}.self_attn.out_proj", "blocks.{i}.attn.out"),
    ("decoder.layers.{i}.final_layer_norm", "blocks.{i}.norm2"),
    ("decoder.layers.{i}.fc1", "blocks.{i}.mlp.up"),
    ("decoder.layers.{i}.fc2", "blocks.{i}.mlp.down"),
    ("decoder.final_layer_norm", "norm"),
)

NAMES: tuple[Row, ...] = (*((f"model.{row[0]}", *row[1:]) for row in _ROWS), *_ROWS, ("lm_head", "lm_head"))
"""The first checkpoints hold the model without its head, and name tensors from there."""

DEFAULTS = {
    "tie_word_embeddings": True,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The norms' eps is not in the config; it is that of torch."""
    return in_common_words(raw, DEFAULTS, {"ffn_dim": "intermediate_size"}) | {"layer_norm_eps": 1e-5}


class NormAfter(Layer):
    """norm1(x + attn(x)), then norm2(x + mlp(x)) (OPT-350m; the order of Vaswani et al., 2017)."""

    def __init__(self, norm1: LayerNorm, attn: AttentionLayer, norm2: LayerNorm, mlp: PlainMLP):
        self.norm1, self.attn, self.norm2, self.mlp = norm1, attn, norm2, mlp

    def __call__(self, ops: Ops, batch: Any, x: Array, rotary: Array | None) -> Array:
        x = self.norm1(ops, self.attn(ops, batch, x, rotary, x))
        return self.norm2(ops, self.mlp(ops, x, x))


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    bias, learned = bool(c.raw["enable_bias"]), bool(c.raw["layer_norm_elementwise_affine"])
    before = bool(c.raw["do_layer_norm_before"])

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, learned=learned, bias=True)

    def block(i: int) -> AnyBlock:
        parts = (
            norm(),
            Attention(c.attention.multi_head, None, bias=bias, out_bias=bias),
            norm(),
            PlainMLP(c.hidden_size, c.intermediate_size, c.activation, bias=bias),
        )
        return Block(*parts) if before else NormAfter(*parts)

    return Decoder(
        c,
        block,
        norm() if before and not c.raw.get("_remove_final_layer_norm") else None,
        embed_width=c.number("word_embed_proj_dim", 0),
        positions=Positions(c.max_position_embeddings + 2, c.hidden_size, offset=2),
    )
