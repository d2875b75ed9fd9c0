"""Name tables: which tensor of a checkpoint fills which leaf of a model.

A table is a sequence of rows (checkpoint name, our path) or (checkpoint name, our path, view). `{i}` runs over the
layers and `{e}` over the experts; `{q,k,v}` on both sides makes one row per word. A path may end in a part of a leaf
("blocks.{i}.attn.qkv.{q,k,v}"); the leaf's own path stands for a tensor that holds all parts, one after another. With
`{e}` in the path only, the tensor is a stack with one entry per expert.

Suffixes (.weight, .bias) are the loader's business, unless the path has one: the row then names the tensor in full. Of
several rows for one path the first whose tensor exists is taken; where none exists, the first (a row for the whole leaf
counts among those for its parts) is said to be missing. A view says how the tensor lies where it does not lie as the
leaf wants it (`octavo.layers.views`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from octavo.layers.views import View

Row = tuple[str, str] | tuple[str, str, View]
Names = tuple[Row, ...]

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
"""The layout of Llama and of most families since; others add rows or replace them (`but`)."""

PLAIN_MLP: Names = (
    *(row for row in LLAMA if ".mlp." not in row[0]),
    ("model.layers.{i}.mlp.{up,down}_proj", "blocks.{i}.mlp.{up,down}"),
)
"""Llama's layout around an MLP without a gate."""

SANDWICH: Names = (
    ("model.layers.{i}.post_attention_layernorm", "blocks.{i}.post1"),
    ("model.layers.{i}.pre_feedforward_layernorm", "blocks.{i}.norm2"),
    ("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.post2"),
)
"""Norms before and after each branch, in place of LLAMA's second norm (Gemma 2 and later)."""

QK_NORM: Names = (("model.layers.{i}.self_attn.{q,k}_norm", "blocks.{i}.attn.{q,k}_norm"),)

EXPERTS: Names = (
    ("model.layers.{i}.mlp.gate", "blocks.{i}.mlp.router"),
    ("model.layers.{i}.mlp.gate.e_score_correction_bias", "blocks.{i}.mlp.correction"),
    ("model.layers.{i}.mlp.experts.{e}.{gate,up}_proj", "blocks.{i}.mlp.gate_up.{e}.{gate,up}"),
    ("model.layers.{i}.mlp.experts.{e}.down_proj", "blocks.{i}.mlp.down.{e}"),
    ("model.layers.{i}.mlp.experts.{gate,up}_proj", "blocks.{i}.mlp.gate_up.{e}.{gate,up}"),
    ("model.layers.{i}.mlp.experts.down_proj", "blocks.{i}.mlp.down.{e}"),
)
"""The layout of most mixtures of experts: a tensor per expert, or (GGUF) a stack of all. To stand before the rows of
dense layers, whose names an error would give otherwise."""

SHARED_EXPERTS: Names = (
    ("model.layers.{i}.mlp.shared_experts.{gate,up}_proj", "blocks.{i}.mlp.shared.gate_up.{gate,up}"),
    ("model.layers.{i}.mlp.shared_experts.down_proj", "blocks.{i}.mlp.shared.down"),
)
"""The experts that every token passes, as one."""


def but(names: Names, *rows: Row) -> Names:
    """`names` with `rows` in place of those for the same paths, and after them."""
    paths = {row[1] for row in rows}
    return (*(row for row in names if row[1] not in paths), *rows)


class Source(NamedTuple):
    """Where a tensor may be found."""

    name: str
    path: str
    view: View | None = None
    expert: int | None = None
    """Which entry of a stack."""
    row: int = 0
    """Of the table."""


_WORDS = re.compile(r"\{(\w+(?:,\w+)+)\}")


def expand(names: Names, layers: int, experts: int = 0) -> Iterator[Source]:
    """Every source of a model with `layers` layers and `experts` experts in each."""
    for row, (theirs, ours, *views) in enumerate(names):
        view = views[0] if views else None
        stacked = "{e}" in ours and "{e}" not in theirs
        for i in range(layers) if "{i}" in ours else range(1):
            for e in range(experts) if "{e}" in ours else range(1):
                a, b = (text.replace("{i}", str(i)).replace("{e}", str(e)) for text in (theirs, ours))
                for name, path in _words(a, b):
                    yield Source(name, path, view, e if stacked else None, row)


def _words(theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    words = _WORDS.search(theirs)
    if words is None:
        yield theirs, ours
        return
    targets = _WORDS.search(ours)
    if targets is None or targets[1] != words[1]:
        raise ValueError(f"name table row {theirs!r} -> {ours!r}: both sides need the same word list")
    for word in words[1].split(","):
        yield _WORDS.sub(word, theirs, count=1), _WORDS.sub(word, ours, count=1)
