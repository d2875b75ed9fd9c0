"""EXAONE 4: branches normed after instead of before, RMS norms on the heads of q and k; where some layers slide, only
those rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.attention import Attention
from octavo.layers.mlp import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.models.config import ModelConfig, whole
from octavo.models.decoder import Block, Decoder
from octavo.models.names import LLAMA, QK_NORM

NAMES = (
    *(row for row in LLAMA if not row[0].endswith("layernorm")),
    *QK_NORM,
    ("model.layers.{i}.post_attention_layernorm", "blocks.{i}.post1"),
    ("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.post2"),
)


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, **raw}
    if not isinstance(out["sliding_window_pattern"], str):
        whole(out, "sliding_window_pattern", 0)
    if raw.get("layer_types") is None:
        layers = raw.get("num_hidden_layers") or 0
        slides = [
            out["sliding_window"] is not None and _slides(out["sliding_window_pattern"], i, layers)
            for i in range(layers)
        ]
        out["layer_types"] = ["sliding_attention" if s else "full_attention" for s in slides]
    return out


def _slides(pattern: int | str | None, i: int, layers: int) -> bool:
    """By "LLLG": local or global by turns, the last layer always global; by 4: every fourth is global."""
    if pattern and isinstance(pattern, str):
        return i != layers - 1 and pattern[i % len(pattern)] == "L"
    return isinstance(pattern, int) and pattern > 0 and (i + 1) % pattern != 0


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    rope = make_rope(c.rope, c.head_dim, c.max_position_embeddings, max_model_len)
    hybrid = c.raw["sliding_window"] is not None

    def norm(width: int) -> RMSNorm:
        return RMSNorm(width, c.eps)

    def block(i: int) -> Block:
        return Block(
            norm1=None,
            attn=Attention(
                c.attention,
                rope if c.windows[i] or not hybrid else None,
                window=c.windows[i],
                q_norm=norm(c.head_dim),
                k_norm=norm(c.head_dim),
            ),
            post1=norm(c.hidden_size),
            norm2=None,
            mlp=GatedMLP(c.hidden_size, c.intermediate_size, c.activation),
            post2=norm(c.hidden_size),
        )

    return Decoder(c, block, norm(c.hidden_size))
