"""Apertus: RMS norms on the heads of q and k, and an MLP without a gate whose activation, xIELU, learns two numbers per
layer (Huang and Schlag, "Deriving activation functions using integration", 2024)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from octavo.layers.linear import Leaf, Need, Value, vectors
from octavo.layers.mlp import PlainMLP
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.dense import dense
from octavo.models.names import PLAIN_MLP, QK_NORM
from octavo.ops.contract import F32, Array, Device, Ops, Vector

NAMES = (
    *(row for row in PLAIN_MLP if not row[0].endswith("layernorm")),
    *QK_NORM,
    ("model.layers.{i}.attention_layernorm", "blocks.{i}.norm1"),
    ("model.layers.{i}.feedforward_layernorm", "blocks.{i}.norm2"),
    ("model.layers.{i}.mlp.act_fn.{alpha_p,alpha_n,beta,eps}", "blocks.{i}.mlp.xielu.{alpha_p,alpha_n,beta,eps}"),
)

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Where the config has none."""


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    defaults = {"rope_theta": 12000000.0, "max_position_embeddings": 65536}
    out = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, **defaults, **raw}
    if not raw.get("rope_parameters") and not raw.get("rope_scaling"):
        out["rope_parameters"] = _ROPE
    return out


class XIELU(Leaf):
    """The parameters of the activation of one layer: (softplus(alpha_p), beta + softplus(alpha_n), beta, eps)."""

    weight: Vector

    def needs(self) -> list[Need]:
        shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
        return [Need(part, "", shape, matrix=False) for part, shape in shapes.items()]

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        p, n, beta, eps = (value.reshape(()) for value in vectors(values))
        parameters: F32 = np.stack([np.logaddexp(0, p), beta + np.logaddexp(0, n), beta, eps]).astype(np.float32)
        self.weight = device.vector(parameters)


class XIELUMLP(PlainMLP):
    """down(xielu(up(x))) (+ residual)."""

    def __init__(self, hidden: int, inner: int):
        super().__init__(hidden, inner, "xielu", bias=False)
        self.xielu = XIELU()

    def __call__(self, ops: Ops, x: Array, residual: Array | None) -> Array:
        return self.down(ops, ops.activate(self.up(ops, x), "xielu", self.xielu.weight), residual)


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    for key, built in (("post_norm", False), ("qk_norm", True), ("mlp_bias", False)):
        if c.raw.get(key, built) is not built:
            raise ModelConfigError(f"{key} = {c.raw[key]!r}: Apertus is built with {built} only")

    def mlp(i: int) -> PlainMLP:
        if c.activation == "xielu":
            return XIELUMLP(c.hidden_size, c.intermediate_size)
        return PlainMLP(c.hidden_size, c.intermediate_size, c.activation, bias=False)

    return dense(c, max_model_len, bias=c.attention_bias, out_bias=c.attention_bias, qk_norm=True, mlp=mlp)
