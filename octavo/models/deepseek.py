"""DeepSeek V2 and V3 (also Moonlight and Kimi K2): latent attention, and after some dense layers mixtures of many small
experts beside shared ones, chosen by groups.

DeepSeek-AI, "DeepSeek-V2" and "DeepSeek-V3 technical report" (2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.latent import LatentAttention
from octavo.layers.mlp import GatedMLP
from octavo.layers.moe import MoE
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope, yarn_magnitude
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.latent_names import latent_names
from octavo.models.names import EXPERTS, LLAMA, Names
from octavo.ops.contract import Router

DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
}
V2 = {**DEFAULTS, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
V3 = {
    **DEFAULTS,
    "max_position_embeddings": 4096,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
"""Of transformers' DeepseekV2Config and DeepseekV3Config."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """`head_dim` is what RoPE turns: configs say nothing of the kind, or (transformers 5) this."""
    out = in_common_words(raw, V2 if "DeepseekV2ForCausalLM" in raw["architectures"] else V3)
    return {**out, "head_dim": out["qk_rope_head_dim"]}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    nope, rotated, value, latent = _sizes(c)
    inner, shared = c.number("moe_intermediate_size"), c.number("n_shared_experts", 0)
    dense, every = c.number("first_k_dense_replace", 0), c.number("moe_layer_freq", 1, zero=False)
    router = _router(c) if c.experts else None
    if c.mlp_bias:
        raise ModelConfigError("mlp_bias = true is not supported for DeepSeek models")
    rope = make_rope(c.rope, rotated, c.max_position_embeddings, max_model_len)
    scale = (nope + rotated) ** -0.5
    if c.rope["rope_type"] != "default" and c.rope.get("mscale_all_dim"):
        scale *= yarn_magnitude(float(c.rope.get("factor") or 1.0), float(c.rope["mscale_all_dim"])) ** 2

    def mlp(i: int) -> GatedMLP | MoE:
        if router is None or i < dense or i % every:
            return GatedMLP(c.hidden_size, c.intermediate_size, c.activation)
        return MoE(
            c.hidden_size,
            inner,
            c.experts,
            router,
            c.activation,
            shared=shared * inner,
            correction=router.scoring == "sigmoid",
        )

    def block(i: int) -> Block:
        return Block(
            norm1=RMSNorm(c.hidden_size, c.eps),
            attn=LatentAttention(
                c.hidden_size,
                c.heads,
                rope,
                nope=nope,
                rotated=rotated,
                value=value,
                latent=latent,
                q_latent=c.number("q_lora_rank", 0),
                scale=scale,
                eps=1e-6,  # whatever rms_norm_eps says: the published code gives these norms none of their own
                bias=bool(c.attention_bias),
            ),
            norm2=RMSNorm(c.hidden_size, c.eps),
            mlp=mlp(i),
        )

    return Decoder(c, block, RMSNorm(c.hidden_size, c.eps))


def _sizes(c: ModelConfig) -> tuple[int, int, int, int]:
    """Of a head's part without position and with it, of a value head, of the compressed vector."""
    keys = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    nope, rotated, value, latent = (c.number(key) for key in keys)
    return nope, rotated, value, latent


def _router(c: ModelConfig) -> Router:
    scoring, method = ("softmax", "greedy") if c.architecture.startswith("DeepseekV2") else ("sigmoid", "noaux_tc")
    scoring, method = c.raw.get("scoring_func", scoring), c.raw.get("topk_method", method)
    rule = Router(c.number("num_experts_per_tok"), scale=c.real("routed_scaling_factor", 1.0))
    limited = rule._replace(groups=c.number("n_group", 1), top_groups=c.number("topk_group", 1))
    renormalize = bool(c.raw.get("norm_topk_prob"))
    if (scoring, method) == ("sigmoid", "noaux_tc"):
        return limited._replace(scoring="sigmoid", group_score="top2", renormalize=renormalize, eps=1e-20)
    if scoring != "softmax" or method not in ("greedy", "group_limited_greedy"):
        raise ModelConfigError(f"topk_method = {method!r} with scoring_func = {scoring!r} is not supported")
    if renormalize:
        raise ModelConfigError("norm_topk_prob = true with scoring_func = 'softmax' is not supported")
    return limited if method == "group_limited_greedy" else rule


def names(c: ModelConfig) -> Names:
    return (
        *EXPERTS,
        *(row for row in LLAMA if "q,k,v" not in row[0]),
        ("model.layers.{i}.mlp.shared_experts.{gate,up}_proj", "blocks.{i}.mlp.shared.gate_up.{gate,up}"),
        ("model.layers.{i}.mlp.shared_experts.down_proj", "blocks.{i}.mlp.shared.down"),
        *latent_names(
            c.heads,
            *_sizes(c),
            compressed=bool(c.raw.get("q_lora_rank")),
            neighbours=bool(c.raw.get("rope_interleave", True)),
        ),
    )


def ignore(c: ModelConfig) -> tuple[str, ...]:
    """The layers after the last, which predict further tokens at once."""
    last = c.layers + c.number("num_nextn_predict_layers", 0)
    return tuple(f"model.layers.{i}.*" for i in range(c.layers, last))
