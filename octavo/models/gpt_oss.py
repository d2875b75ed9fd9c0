"""gpt-oss: attention sinks, every second layer sliding, experts with a clamped SwiGLU and biases, published in MXFP4.

OpenAI, "gpt-oss-120b & gpt-oss-20b model card" (2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from octavo.layers.attention import Attention
from octavo.layers.moe import MoE
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.layers.views import Rows, Transposed
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words, whole
from octavo.models.decoder import Block, Decoder
from octavo.models.names import EXPERTS, LLAMA, Names
from octavo.ops.contract import Router

DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "rope_theta": 150000.0,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of transformers' GptOssConfig."""

ALPHA = 1.702
"""Of the experts' x sigmoid(alpha x)."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = in_common_words(raw, DEFAULTS)
    if out.get("layer_types") is None:
        layers = range(whole(out, "num_hidden_layers", 0))
        out["layer_types"] = ["full_attention" if i % 2 else "sliding_attention" for i in layers]
    if not out.get("rope_parameters") and not out.get("rope_scaling"):
        out["rope_scaling"] = YARN
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    if c.raw.get("swiglu_alpha", ALPHA) != ALPHA:
        raise ModelConfigError(f"swiglu_alpha = {c.raw['swiglu_alpha']!r} is not supported: it must be {ALPHA}")
    top_k = c.number("num_experts_per_tok")
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def block(i: int) -> Block:
        return Block(
            norm1=RMSNorm(c.hidden_size, c.eps),
            attn=Attention(
                c.attention,
                rope,
                window=c.windows[i],
                sinks=True,
                bias=c.attention_bias,
                out_bias=c.attention_bias,
            ),
            norm2=RMSNorm(c.hidden_size, c.eps),
            mlp=MoE(
                c.hidden_size,
                c.intermediate_size,
                c.experts,
                Router(top_k, renormalize=True),  # the softmax of the chosen logits
                "swiglu_oai",
                bias=True,
                router_bias=True,
                limit=c.real("swiglu_limit", 7.0),
            ),
        )

    return Decoder(c, block, RMSNorm(c.hidden_size, c.eps))


def names(c: ModelConfig) -> Names:
    inner = c.intermediate_size
    halves = Rows(np.arange(2 * inner).reshape(inner, 2).T.reshape(-1), 2 * inner)  # rows of gate and up take turns
    experts = "model.layers.{i}.mlp.experts."
    return (
        *(row for row in LLAMA if ".mlp." not in row[0]),
        ("model.layers.{i}.self_attn.sinks", "blocks.{i}.attn.sinks"),
        ("model.layers.{i}.mlp.router", "blocks.{i}.mlp.router"),
        (experts + "gate_up_proj", "blocks.{i}.mlp.gate_up.{e}.weight", Transposed(halves)),
        (experts + "gate_up_proj_blocks", "blocks.{i}.mlp.gate_up.{e}.weight", halves),
        (experts + "gate_up_proj_bias", "blocks.{i}.mlp.gate_up.{e}.bias", halves),
        (experts + "down_proj", "blocks.{i}.mlp.down.{e}.weight", Transposed()),
        (experts + "down_proj_blocks", "blocks.{i}.mlp.down.{e}.weight"),
        (experts + "down_proj_bias", "blocks.{i}.mlp.down.{e}.bias"),
        *EXPERTS,
    )
