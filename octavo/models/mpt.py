"""MPT: ALiBi or learned positions, layer norms, plain MLPs, no biases; queries, keys and values may be clipped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.alibi import alibi_slopes
from octavo.layers.attention import Attention
from octavo.layers.linear import Positions
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words, real, whole
from octavo.models.decoder import Block, Decoder

NAMES = (
    ("transformer.wte", "embed"),
    ("transformer.wpe", "positions"),
    ("transformer.blocks.{i}.norm_1", "blocks.{i}.norm1"),
    ("transformer.blocks.{i}.attn.Wqkv", "blocks.{i}.attn.qkv"),
    ("transformer.blocks.{i}.attn.out_proj", "blocks.{i}.attn.out"),
    ("transformer.blocks.{i}.norm_2", "blocks.{i}.norm2"),
    ("transformer.blocks.{i}.ffn.up_proj", "blocks.{i}.mlp.up"),
    ("transformer.blocks.{i}.ffn.down_proj", "blocks.{i}.mlp.down"),
    ("transformer.norm_f", "norm"),
    ("lm_head", "lm_head"),
)

DEFAULTS = {"tie_word_embeddings": True, "hidden_act": "gelu", "layer_norm_epsilon": 1e-5, "no_bias": True}

WORDS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}

_BUILT: Mapping[str, tuple[Any, ...]] = {
    "logit_scale": (None, 1.0),
    "norm_type": ("low_precision_layernorm", "layernorm"),
    "attn_config.attn_type": ("multihead_attention",),
    "attn_config.prefix_lm": (False,),
    "attn_config.qk_ln": (False,),
    "attn_config.qk_gn": (False,),
    "attn_config.attn_uses_sequence_id": (False,),
    "attn_config.rope": (False,),
    "attn_config.sliding_window_size": (-1,),
    "ffn_config.ffn_type": ("mptmlp",),
}
"""Of the keys of MPT's own code, the values that are built; the first is what an absent key means."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = in_common_words(raw, DEFAULTS, WORDS)
    out["intermediate_size"] = whole(out, "expansion_ratio", 4, zero=False) * (out.get("hidden_size") or 0)
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    for key, built in _BUILT.items():
        value: Any = c.raw
        for word in key.split("."):
            value = (value or {}).get(word)
        if value is not None and value not in built:
            raise ModelConfigError(f"{key} = {value!r} is not supported; known: {', '.join(map(repr, built))}")
    attention = c.raw.get("attn_config") or {}
    alibi = bool(attention.get("alibi", True))
    bias = not c.raw["no_bias"]

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=bias)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention.multi_head,
                None,
                scale=None if attention.get("softmax_scale") is None else real(attention, "softmax_scale", zero=False),
                alibi=alibi_slopes(c.heads, real(attention, "alibi_bias_max", 8.0, zero=False)) if alibi else (),
                clip=real(attention, "clip_qkv", 0.0),
                bias=bias,
                out_bias=bias,
            ),
            norm2=norm(),
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation, bias=bias),
        )

    positions = None if alibi else Positions(c.max_position_embeddings, c.hidden_size)
    return Decoder(c, block, norm(), positions=positions)
