"""StarCoder 2: layer norms and a plain MLP around rotary grouped-query attention, biases everywhere, a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import PlainMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA

NAMES = (
    *(row for row in LLAMA if ".mlp." not in row[0]),
    ("model.layers.{i}.mlp.c_fc", "blocks.{i}.mlp.up"),
    ("model.layers.{i}.mlp.c_proj", "blocks.{i}.mlp.down"),
)

DEFAULTS = {
    "tie_word_embeddings": True,
    "use_bias": True,
    "hidden_act": "gelu_pytorch_tanh",
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return in_common_words(raw, DEFAULTS)


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    bias = bool(c.raw["use_bias"])
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention,
                rope,
                window=c.windows[i],
                bias=bias,
                out_bias=bias,
            ),
            norm2=norm(),
            mlp=PlainMLP(c.hidden_size, c.intermediate_size, c.activation, bias=bias),
        )

    return Decoder(c, block, norm())
