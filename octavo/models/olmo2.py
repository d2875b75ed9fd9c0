"""OLMo 2 and 3: branches are normed after instead of before, q and k over all their heads at once. OLMo 3 slides in
three layers of four, and scales RoPE only in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, whole
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA, QK_NORM

NAMES = (
    *(row for row in LLAMA if not row[0].endswith("layernorm")),
    *QK_NORM,
    ("model.layers.{i}.post_attention_layernorm", "blocks.{i}.post1"),
    ("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.post2"),
)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = {"rms_norm_eps": 1e-5, **raw}
    if "Olmo3ForCausalLM" in raw["architectures"]:
        out = {"rope_theta": 500000.0, "sliding_window": 4096, **out}
        if raw.get("layer_types") is None:
            layers = range(whole(raw, "num_hidden_layers", 0))
            out["layer_types"] = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in layers]
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    plain = {"rope_type": "default", "rope_theta": c.rope["rope_theta"]}
    sliding = {**plain, **((c.raw.get("rope_parameters") or {}).get("sliding_attention") or {})}
    ropes = {
        kind: make_rope(parameters, c.head_dim, c.max_position_embeddings, max_model_len)
        for kind, parameters in (("full_attention", c.rope), ("sliding_attention", sliding))
    }

    def norm(width: int) -> RMSNorm:
        return RMSNorm(width, c.eps)

    def block(i: int) -> Block:
        return Block(
            norm1=None,
            attn=Attention(
                c.attention,
                ropes[c.layer_types[i]],
                window=c.windows[i],
                bias=c.attention_bias,
                out_bias=c.attention_bias,
                q_norm=norm(c.heads * c.head_dim),
                k_norm=norm(c.kv_heads * c.head_dim),
                norm_over="all",
            ),
            post1=norm(c.hidden_size),
            norm2=None,
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
            post2=norm(c.hidden_size),
        )

    return Decoder(c, block, norm(c.hidden_size))
