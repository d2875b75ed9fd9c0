"""Phi-3.5-MoE: layer norms, biases, and two experts per token chosen by SparseMixer (Abdin et al., "Phi-3 technical
report", 2024; Liu et al., "GRIN: Gradient-informed MoE", 2024)."""

from __future__ import annotations

from octavo.layers.attention import Attention
from octavo.layers.moe import MoE
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import checked, make_rope
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Block, Decoder
from octavo.models.mixtral import NAMES, rewrite
from octavo.ops.contract import Rope, Router

__all__ = ["NAMES", "make", "rewrite"]


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rope = _rope(c, max_model_len)
    if c.number("num_experts_per_tok", 2) != 2:
        raise ModelConfigError(f"num_experts_per_tok = {c.raw['num_experts_per_tok']}: SparseMixer chooses 2")
    if c.tie_word_embeddings and c.raw.get("lm_head_bias"):
        raise ModelConfigError("lm_head_bias = true with tie_word_embeddings = true is not supported")
    router = Router(2, "sparsemixer", jitter=c.real("router_jitter_noise", 0.01))
    bias = bool(c.attention_bias)

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
            mlp=MoE(c.hidden_size, c.intermediate_size, c.experts, router, c.activation),
        )

    return Decoder(c, block, norm(), head_bias=bool(c.raw.get("lm_head_bias")))


def _rope(c: ModelConfig, max_model_len: int) -> Rope:
    """As elsewhere, but the config says by what queries and keys are multiplied: `short_mscale` and `long_mscale`."""
    rope = checked(c.rope)
    kind = rope.setdefault("rope_type", "default")
    if kind == "longrope":
        original = rope.get("original_max_position_embeddings") or c.max_position_embeddings
        key = "long_mscale" if max_model_len > original else "short_mscale"
        if not isinstance(rope.get(key), int | float):
            raise ModelConfigError(f"rope_scaling of type longrope has {key} = {rope.get(key)!r}, a number is needed")
        rope["attention_factor"] = rope[key]
    elif kind != "default":
        raise ModelConfigError(f"rope_type {kind!r} is not supported for Phi-3.5-MoE")
    return make_rope(rope, c.head_dim, c.max_position_embeddings, max_model_len)
