"""The plain pre-norm decoder with a gated MLP that Llama made common: what its relatives share, said once."""

from __future__ import annotations

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig
from octavo.models.decoder import Block, Decoder


def dense(
    c: ModelConfig,
    max_model_len: int,
    *,
    bias: bool | None,
    out_bias: bool | None = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Decoder:
    """A decoder of RMS norms, rotary grouped-query attention and gated MLPs.

    `bias`: on q, k and v; `out_bias`: on the output projection; `mlp_bias`: on the MLP's three matrices; `qk_norm`: an
    RMS norm on each query and key head.
    """
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def block(i: int) -> Block:
        return Block(
            norm1=RMSNorm(c.hidden_size, c.eps),
            attn=Attention(
                c.hidden_size,
                c.heads,
                c.kv_heads,
                c.head_dim,
                rope,
                window=c.windows[i],
                bias=bias,
                out_bias=out_bias,
                q_norm=RMSNorm(c.head_dim, c.eps) if qk_norm else None,
                k_norm=RMSNorm(c.head_dim, c.eps) if qk_norm else None,
            ),
            norm2=RMSNorm(c.hidden_size, c.eps),
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation, bias=mlp_bias),
        )

    return Decoder(c, block, RMSNorm(c.hidden_size, c.eps))
