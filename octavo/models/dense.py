"""The plain pre-norm decoder with a gated MLP that Llama made common: what its relatives share, said once."""

from __future__ import annotations

from collections.abc import Callable

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig
from octavo.models.decoder import MLP, Block, Decoder
from octavo.ops.contract import Temperature


def dense(
    c: ModelConfig,
    max_model_len: int,
    *,
    bias: bool | None,
    out_bias: bool | None = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    norm_after: bool = False,
    mlp: Callable[[int], MLP] | None = None,
    attention_scale: float | None = None,
    temperature: Temperature | None = None,
    residual_scale: float = 1.0,
    embed_scale: float = 1.0,
    logit_scale: float = 1.0,
) -> Decoder:
    """A decoder of RMS norms, rotary grouped-query attention and gated MLPs.

    `bias`: on q, k and v; `out_bias`: on the output projection; `mlp_bias`: on the MLP's three matrices; `qk_norm`: an
    RMS norm on each query and key head, `norm_after` the rotation instead of before; `mlp`: makes another MLP
    for each layer.

    `attention_scale` multiplies q.k instead of head_dim^-1/2, `temperature` queries by their position;
    `residual_scale` what attention and the gated MLP add to the residual; `embed_scale` the embeddings and
    `logit_scale` the logits.
    """
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def block(i: int) -> Block:
        return Block(
            norm1=RMSNorm(c.hidden_size, c.eps),
            attn=Attention(
                c.attention,
                rope,
                window=c.windows[i],
                scale=attention_scale,
                temperature=temperature,
                bias=bias,
                out_bias=out_bias,
                out_scale=residual_scale,
                q_norm=RMSNorm(c.head_dim, c.eps) if qk_norm else None,
                k_norm=RMSNorm(c.head_dim, c.eps) if qk_norm else None,
                norm_after=norm_after,
            ),
            norm2=RMSNorm(c.hidden_size, c.eps),
            mlp=(mlp or gated)(i),
        )

    def gated(i: int) -> MLP:
        return GatedMLP(c.hidden_size, c.intermediate_size, c.activation, bias=mlp_bias, scale=residual_scale)

    norm = RMSNorm(c.hidden_size, c.eps)
    return Decoder(c, block, norm, embed_scale=embed_scale, logit_scale=logit_scale)
