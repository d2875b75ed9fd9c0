"""Llama 4 text (Scout and Maverick): rotary layers that see a chunk of the context, between them full layers without
positions whose queries grow with their position; one expert of many, beside a shared one, in all or in every second
layer.

Meta, "Llama 4" (release, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.layers.views import Transposed, interleaved
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words, whole
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA, Names
from octavo.ops.contract import Router, Temperature

DEFAULTS = {
    "intermediate_size_mlp": 16384,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "rope_theta": 500000.0,
}
"""Of transformers' Llama4TextConfig."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which layers turn, see chunks and have experts follows from intervals where no list says it."""
    out = in_common_words(raw, DEFAULTS)
    layers = range(whole(out, "num_hidden_layers", 0))
    step, interval = (whole(out, key, zero=False) for key in ("interleave_moe_layer_step", "no_rope_layer_interval"))
    if not out.get("no_rope_layers"):
        out["no_rope_layers"] = [(i + 1) % interval != 0 for i in layers]
    if out.get("moe_layers") is None:
        out["moe_layers"] = list(layers[step - 1 :: step])
    if out.get("layer_types") is None:
        turned = "chunked_attention" if out["attention_chunk_size"] else "full_attention"
        out["layer_types"] = [turned if turns else "full_attention" for turns in out["no_rope_layers"]]
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    turned, sparse = c.raw["no_rope_layers"], c.raw["moe_layers"]
    if len(turned) != c.layers:
        raise ModelConfigError(f"no_rope_layers lists {len(turned)} layers, num_hidden_layers says {c.layers}")
    if "sliding_attention" in c.layer_types:
        raise ModelConfigError("layer_types holds 'sliding_attention', which Llama 4 does not have")
    chunk, dense = c.number("attention_chunk_size", 0), c.number("intermediate_size_mlp")
    if "chunked_attention" in c.layer_types and not chunk:
        raise ModelConfigError("layer_types asks for chunked attention, but attention_chunk_size is not set")
    router = Router(c.number("num_experts_per_tok", 1), "sigmoid", weigh_input=True)
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)
    temperature = None
    if c.raw.get("attn_temperature_tuning", True):
        temperature = Temperature(c.real("attn_scale", 0.1), float(c.number("floor_scale", 8192)))

    def block(i: int) -> Block:
        normed = turned[i] and c.raw.get("use_qk_norm", True)
        return Block(
            norm1=RMSNorm(c.hidden_size, c.eps),
            attn=Attention(
                c.attention,
                rope if turned[i] else None,
                chunk=chunk if c.layer_types[i] == "chunked_attention" else 0,
                temperature=None if turned[i] else temperature,
                bias=c.attention_bias,
                out_bias=c.attention_bias,
                q_norm=RMSNorm(c.head_dim, c.eps, learned=False) if normed else None,
                k_norm=RMSNorm(c.head_dim, c.eps, learned=False) if normed else None,
                norm_after=True,
            ),
            norm2=RMSNorm(c.hidden_size, c.eps),
            mlp=MoE(c.hidden_size, c.intermediate_size, c.experts, router, c.activation, shared=c.intermediate_size)
            if i in sparse
            else GatedMLP(c.hidden_size, dense, c.activation),
        )

    return Decoder(c, block, RMSNorm(c.hidden_size, c.eps))


def names(c: ModelConfig) -> Names:
    layer, experts = "model.layers.{i}.", "model.layers.{i}.feed_forward.experts."
    turned = {word: interleaved(heads, c.head_dim) for word, heads in (("q", c.heads), ("k", c.kv_heads))}
    return (
        *(row for row in LLAMA if ".mlp." not in row[0] and "q,k,v" not in row[0]),
        *((f"{layer}self_attn.{word}_proj", f"blocks.{{i}}.attn.qkv.{word}", view) for word, view in turned.items()),
        (layer + "self_attn.v_proj", "blocks.{i}.attn.qkv.v"),
        (layer + "feed_forward.router", "blocks.{i}.mlp.router"),
        (experts + "gate_up_proj", "blocks.{i}.mlp.gate_up.{e}.weight", Transposed()),
        (experts + "down_proj", "blocks.{i}.mlp.down.{e}.weight", Transposed()),
        (experts + "{e}.{gate,up}_proj", "blocks.{i}.mlp.gate_up.{e}.{gate,up}"),
        (experts + "{e}.down_proj", "blocks.{i}.mlp.down.{e}"),
        (experts + "gate_up_proj", "blocks.{i}.mlp.gate_up.{e}"),
        (experts + "{gate,up}_proj", "blocks.{i}.mlp.gate_up.{e}.{gate,up}"),
        (experts + "down_proj", "blocks.{i}.mlp.down.{e}"),
        (layer + "feed_forward.shared_expert.{gate,up}_proj", "blocks.{i}.mlp.shared.gate_up.{gate,up}"),
        (layer + "feed_forward.shared_expert.down_proj", "blocks.{i}.mlp.shared.down"),
        (layer + "feed_forward.{gate,up}_proj", "blocks.{i}.mlp.gate_up.{gate,up}"),
        (layer + "feed_forward.down_proj", "blocks.{i}.mlp.down"),
    )
