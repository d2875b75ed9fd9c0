"""Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", 2024), with its up-projections absorbed.

The cache holds one compressed vector and one rotated key per token. q_nope^T (W_uk c) = (W_uk^T q_nope)^T c, so the
query is projected once and the keys never: prefill and decode compute the same expression.
"""

from __future__ import annotations

from typing import Any

from octavo.layers.attention import Placed
from octavo.layers.linear import Headwise, Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.contract import Array, AttentionShape, KVShape, Ops, Rope
from octavo.parallel.rank import Rank


class LatentAttention(Placed):
    """`nope` and `rotated` are the parts of a query head without and with position, `value` the size of a value head,
    `latent` that of the compressed vector, `q_latent` that of the compressed query (0: the query is not compressed).

    Leaves: q_down and q_norm where compressed, then q_nope and q_rope [heads * part, …]; kv_down, k_rope, kv_norm;
    key_up [heads * latent, nope], the transpose of each head's key projection; value_up [heads * value, latent]; out.
    """

    rope: Rope | None
    window = 0
    chunk = 0

    def __init__(
        self,
        hidden: int,
        heads: int,
        rope: Rope,
        *,
        nope: int,
        rotated: int,
        value: int,
        latent: int,
        q_latent: int,
        scale: float,
        eps: float,
        bias: bool | None = False,
    ):
        self.rope = rope
        self.wanted = AttentionShape(heads, 1, latent + rotated, scale, layer=0, group=0, latent=latent)
        self.q_down = Linear(hidden, {"": q_latent}, bias) if q_latent else None
        self.q_norm = RMSNorm(q_latent, eps) if q_latent else None
        self.q_nope = Linear(q_latent or hidden, {"": heads * nope})
        self.q_rope = Linear(q_latent or hidden, {"": heads * rotated})
        self.kv_down = Linear(hidden, {"": latent}, bias)
        self.k_rope = Linear(hidden, {"": rotated}, bias)
        self.kv_norm = RMSNorm(latent, eps)
        self.key_up = Headwise(heads, nope, latent)
        self.value_up = Headwise(heads, latent, value)
        self.out = Linear(heads * value, {"": hidden}, bias)

    @property
    def kv(self) -> KVShape:
        return KVShape(1, self.wanted.head_dim, self.wanted.latent)

    def split(self, rank: Rank) -> None:
        heads = rank.share(self.wanted.heads, "query heads")
        for linear in (self.q_nope, self.q_rope):
            linear.by_rows(whole=heads.of_parts(linear.parts[""] // heads.whole))
        for headwise in (self.key_up, self.value_up):
            headwise.by_heads(heads)
        self.out.by_columns(heads.of_parts(self.out.n_in // heads.whole), rank)
        self.wanted = self.wanted._replace(heads=heads.size)

    def __call__(self, ops: Ops, batch: Any, x: Array, rotary: Array | None, residual: Array | None) -> Array:
        assert rotary is not None
        query = x
        if self.q_down is not None and self.q_norm is not None:
            query = self.q_norm(ops, self.q_down(ops, x))
        q = ops.store_latent(
            batch,
            self.key_up(ops, self.q_nope(ops, query)),
            self.q_rope(ops, query),
            self.kv_norm(ops, self.kv_down(ops, x)),
            self.k_rope(ops, x),
            rotary,
            self.shape,
        )
        return self.out(ops, self.value_up(ops, ops.attend(batch, q, self.shape)), residual)
