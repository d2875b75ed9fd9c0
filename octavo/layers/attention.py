"""Multi-head attention with grouped KV heads over the paged KV cache."""

from __future__ import annotations

from typing import Any

from octavo.layers.linear import Layer, Linear, RMSNorm
from octavo.ops.contract import Array, AttentionShape, HeadNorm, Ops, Rope


class Attention(Layer):
    """qkv projection, rotation, KV store, paged attention, output projection.

    Layer index and KV group are given by the decoder once it knows all its layers (`place`).
    """

    shape: AttentionShape

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope | None,
        *,
        window: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        bias: bool | None = False,
        out_bias: bool | None = False,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ):
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.rope = rope
        self.window = window
        self.scale = head_dim**-0.5 if scale is None else scale
        self.softcap = softcap
        kv = kv_heads * head_dim
        self.qkv = Linear(hidden, {"q": heads * head_dim, "k": kv, "v": kv}, bias)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.out = Linear(heads * head_dim, {"": hidden}, out_bias)

    def place(self, layer: int, group: int) -> None:
        self.shape = AttentionShape(
            self.heads, self.kv_heads, self.head_dim, self.scale, layer, group, self.window, self.softcap
        )

    def __call__(self, ops: Ops, batch: Any, x: Array, rotary: Array | None, residual: Array | None) -> Array:
        q_norm, k_norm = self.q_norm, self.k_norm
        q = ops.store_kv(
            batch,
            self.qkv(ops, x),
            rotary,
            self.shape,
            HeadNorm(q_norm.weight, q_norm.eps) if q_norm else None,
            HeadNorm(k_norm.weight, k_norm.eps) if k_norm else None,
        )
        return self.out(ops, ops.attend(batch, q, self.shape), residual)
