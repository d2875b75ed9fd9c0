"""Hunyuan A13B: Hunyuan with experts beside a shared MLP (Tencent, "Hunyuan-A13B technical report", 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.moe import MoE
from octavo.models import hunyuan
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import EXPERTS
from octavo.ops.contract import Router

NAMES = (
    ("model.layers.{i}.mlp.gate.wg", "blocks.{i}.mlp.router"),
    *EXPERTS,
    ("model.layers.{i}.mlp.shared_mlp.{gate,up}_proj", "blocks.{i}.mlp.shared.gate_up.{gate,up}"),
    ("model.layers.{i}.mlp.shared_mlp.down_proj", "blocks.{i}.mlp.shared.down"),
    *hunyuan.NAMES,
)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The released config calls the size of a head `attention_head_dim`."""
    return {**hunyuan.rewrite(raw), "head_dim": raw.get("head_dim") or raw.get("attention_head_dim")}


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    for key in ("use_cla", "use_mla", "group_limited_greedy", "mlp_bias"):
        if c.raw.get(key):
            raise ModelConfigError(f"{key} = true is not supported for Hunyuan models with experts")
    if not c.raw.get("use_mixed_mlp_moe", True):
        raise ModelConfigError("use_mixed_mlp_moe = false is not supported for Hunyuan models with experts")
    taken, shared = _by_layer(c, "moe_topk", 1), _by_layer(c, "num_shared_expert", 1)
    inner = _by_layer(c, "moe_intermediate_size", c.intermediate_size)

    def mlp(i: int) -> MoE:
        router = Router(taken[i], renormalize=True)
        together = shared[i] * c.intermediate_size
        return MoE(c.hidden_size, inner[i], c.experts, router, c.activation, shared=together)

    return dense(
        c,
        max_model_len,
        bias=bool(c.attention_bias),
        out_bias=bool(c.attention_bias),
        qk_norm=bool(c.raw["use_qk_norm"]),
        norm_after=True,
        mlp=mlp,
    )


def _by_layer(c: ModelConfig, key: str, default: int) -> list[int]:
    """A number of each layer: the config has a list, or one for all."""
    value = c.raw.get(key)
    if not isinstance(value, list):
        return [c.number(key, default)] * c.layers
    if len(value) != c.layers or not all(type(n) is int and n > 0 for n in value):
        raise ModelConfigError(f"{key} = {value!r}: {c.layers} numbers are needed, one per layer")
    return value
