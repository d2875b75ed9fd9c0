"""Multi-head attention with grouped KV heads over the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from octavo.layers.linear import Layer, Linear, Values
from octavo.layers.norm import Norm
from octavo.ops.contract import Array, AttentionShape, KVShape, Ops, Rope, Temperature
from octavo.parallel.rank import Rank


class Sizes(NamedTuple):
    """What a model says of the attention of every layer."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def multi_head(self) -> Sizes:
        """The same with a KV head for each query head."""
        return self._replace(kv_heads=self.heads)


class Placed(Layer):
    """An attention layer: which cache it uses and its KV group are told by the decoder, which knows all layers."""

    wanted: AttentionShape
    source: int | None = None

    def place(self, cache: int, group: int) -> None:
        self.cache, self.group = cache, group

    @property
    def shape(self) -> AttentionShape:
        """What it is, in its place."""
        return self.wanted._replace(layer=self.cache, group=self.group)


class Attention(Placed):
    """qkv projection, norms, rotation, KV store, paged attention, output projection.

    `window`, `chunk`, `softcap`, `alibi`, `clip`, `temperature`: see `AttentionShape`. `sinks`: the softmax has a
    learned logit per head beside the keys. `norm_over`: the width of the norms of q and k; `norm_after`: these come
    after the rotation. `out_scale` multiplies the output projection (a model's residual multiplier).
    """

    def __init__(
        self,
        sizes: Sizes,
        rope: Rope | None,
        *,
        window: int = 0,
        chunk: int = 0,
        scale: float | None = None,
        softcap: float = 0.0,
        alibi: Sequence[float] = (),
        clip: float = 0.0,
        temperature: Temperature | None = None,
        sinks: bool = False,
        bias: bool | None = False,
        out_bias: bool | None = False,
        out_scale: float = 1.0,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        v_norm: Norm | None = None,
        norm_over: Literal["head", "all"] = "head",
        norm_after: bool = False,
    ):
        hidden, heads, kv_heads, head_dim = sizes
        self.rope = rope
        self.window, self.chunk = window, chunk
        self.wanted = AttentionShape(
            heads,
            kv_heads,
            head_dim,
            head_dim**-0.5 if scale is None else scale,
            layer=0,
            group=0,
            window=window,
            softcap=softcap,
            chunk=chunk,
            alibi=tuple(alibi),
            clip=clip,
            temperature=temperature,
        )
        kv = kv_heads * head_dim
        self.qkv = Linear(hidden, {"q": heads * head_dim, "k": kv, "v": kv}, bias)
        self.q_norm, self.k_norm, self.v_norm = q_norm, k_norm, v_norm
        self.norm_over: Literal["head", "all"] = norm_over
        self.norm_after = norm_after
        self.sinks = Values(heads) if sinks else None
        self.out = Linear(heads * head_dim, {"": hidden}, out_bias, out_scale)

    @property
    def kv(self) -> KVShape:
        return KVShape(self.wanted.kv_heads, self.wanted.head_dim)

    def split(self, rank: Rank) -> None:
        if self.norm_over == "all" and (self.q_norm or self.k_norm):
            return  # the norm needs every head of a token: each rank has them all
        shape = self.wanted
        heads, kv_heads = rank.share(shape.heads, "query heads"), rank.share_or_copy(shape.kv_heads, "KV heads")
        keys = kv_heads.of_parts(shape.head_dim)
        self.qkv.by_rows(q=heads.of_parts(shape.head_dim), k=keys, v=keys)
        self.out.by_columns(heads.of_parts(shape.head_dim), rank)
        for norm, cut in ((self.q_norm, heads), (self.k_norm, kv_heads), (self.v_norm, kv_heads)):
            if norm is not None and norm.width != shape.head_dim:
                norm.by_heads(cut, shape.head_dim)
        if self.sinks is not None:
            self.sinks.by_elements(heads)
        alibi = shape.alibi[heads.start : heads.start + heads.size]
        self.wanted = shape._replace(heads=heads.size, kv_heads=kv_heads.size, alibi=alibi)

    def __call__(self, ops: Ops, batch: Any, x: Array, rotary: Array | None, residual: Array | None) -> Array:
        norms = (
            None if norm is None else norm.of_heads(self.norm_over, self.norm_after)
            for norm in (self.q_norm, self.k_norm, self.v_norm)
        )
        q = ops.store_kv(batch, self.qkv(ops, x), rotary, self.shape, *norms)
        attended = ops.attend(batch, q, self.shape, None if self.sinks is None else self.sinks.weight)
        return self.out(ops, attended, residual)


class SharedAttention(Attention):
    """Reads the keys and values of layer `source`, and has queries only."""

    source: int

    def __init__(self, source: int, sizes: Sizes, rope: Rope, **more: Any):
        super().__init__(sizes, rope, **more)
        self.source = source
        self.qkv = Linear(sizes.hidden, {"q": sizes.heads * sizes.head_dim}, more["bias"])
        self.k_norm = self.v_norm = None
        self.wanted = self.wanted._replace(stores=False)
