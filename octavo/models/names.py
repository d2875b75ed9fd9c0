"""Name tables: which tensor of a checkpoint fills which leaf of a model.

A table is a sequence of rows (checkpoint name, our path). `{i}` runs over the layers; `{q,k,v}` on both sides makes one
row per word. A path may end in a part of a fused leaf ("blocks.{i}.attn.qkv.{q,k,v}"). Suffixes (.weight, .bias) are
the loader's business.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Names = tuple[tuple[str, str], ...]

LLAMA: Names = (
    ("model.embed_tokens", "embed"),
    ("model.layers.{i}.input_layernorm", "blocks.{i}.norm1"),
    ("model.layers.{i}.self_attn.{q,k,v}_proj", "blocks.{i}.attn.qkv.{q,k,v}"),
    ("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attn.out"),
    ("model.layers.{i}.post_attention_layernorm", "blocks.{i}.norm2"),
    ("model.layers.{i}.mlp.{gate,up}_proj", "blocks.{i}.mlp.gate_up.{gate,up}"),
    ("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
    ("model.norm", "norm"),
    ("lm_head", "lm_head"),
)
"""The layout of Llama and of most families since; others add rows or replace them."""

QK_NORM: Names = (("model.layers.{i}.self_attn.{q,k}_norm", "blocks.{i}.attn.{q,k}_norm"),)

_WORDS = re.compile(r"\{(\w+(?:,\w+)+)\}")


def expand(names: Names, layers: int) -> Iterator[tuple[str, str]]:
    """Every (checkpoint name, path) of a model with `layers` layers."""
    for theirs, ours in names:
        indices = range(layers) if "{i}" in theirs else range(1)
        for i in indices:
            a, b = theirs.replace("{i}", str(i)), ours.replace("{i}", str(i))
            words = _WORDS.search(a)
            if words is None:
                yield a, b
                continue
            targets = _WORDS.search(b)
            if targets is None or targets[1] != words[1]:
                raise ValueError(f"name table row {theirs!r} -> {ours!r}: both sides need the same word list")
            for word in words[1].split(","):
                yield _WORDS.sub(word, a, count=1), _WORDS.sub(word, b, count=1)
