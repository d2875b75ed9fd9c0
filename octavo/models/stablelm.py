"""StableLM 2 and 3B-4E1T: Llama with layer norms and a quarter of each head rotated; attention and MLP side by side and
a norm per query and key head (StableLM 2 12B) where the config asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from octavo.layers.attention import Attention
from octavo.layers.linear import Need, Value, vectors
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import LayerNorm
from octavo.layers.rope import make_rope
from octavo.layers.views import Flat
from octavo.models.config import ModelConfig, in_common_words
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA, Names
from octavo.ops.contract import Device
from octavo.parallel.rank import Cut

DEFAULTS = {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096}


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return in_common_words(raw, DEFAULTS)


def names(c: ModelConfig) -> Names:
    """GGUF files have the norms of all heads in one tensor."""
    norms = [("q", head) for head in range(c.heads)] + [("k", head) for head in range(c.kv_heads)]
    return (
        *LLAMA,
        *(
            (f"model.layers.{{i}}.self_attn.{x}_layernorm.norms.{head}", f"blocks.{{i}}.attn.{x}_norm.{head}")
            for x, head in norms
        ),
        *(
            (f"model.layers.{{i}}.self_attn.{x}_layernorm", f"blocks.{{i}}.attn.{x}_norm{part}", Flat(heads))
            for x, heads in (("q", c.heads), ("k", c.kv_heads))
            for part in ("" if heads > 1 else ".0",)
        ),
    )


class _HeadNorms(LayerNorm):
    """A layer norm for each head, every one a tensor of its own."""

    def __init__(self, heads: int, head_dim: int, eps: float):
        super().__init__(heads * head_dim, eps)
        self.heads, self.head_dim = heads, head_dim
        self.kept = slice(0, heads)

    def by_heads(self, cut: Cut, head_dim: int) -> None:
        self.kept, self.width = slice(cut.start, cut.start + cut.size), cut.size * head_dim

    def needs(self) -> list[Need]:
        return [Need(f"{head}", ".weight", (self.head_dim,), matrix=False) for head in range(self.heads)]

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        self.weight = device.vector(np.concatenate(vectors(values)[self.kept]))


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    parallel, qk_norm = bool(c.raw.get("use_parallel_residual")), bool(c.raw.get("qk_layernorm"))
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)

    def norm() -> LayerNorm:
        return LayerNorm(c.hidden_size, c.eps, bias=True)

    def block(i: int) -> Block:
        return Block(
            norm1=norm(),
            attn=Attention(
                c.attention,
                rope,
                bias=bool(c.raw.get("use_qkv_bias")),
                q_norm=_HeadNorms(c.heads, c.head_dim, c.eps) if qk_norm else None,
                k_norm=_HeadNorms(c.kv_heads, c.head_dim, c.eps) if qk_norm else None,
            ),
            norm2=None if parallel else norm(),
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
            parallel=parallel,
        )

    return Decoder(c, block, norm())
