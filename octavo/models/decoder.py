"""Block and Decoder: the only forward over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from octavo.layers.attention import Attention
from octavo.layers.linear import Embedding, Layer, Linear, RMSNorm
from octavo.models.config import ModelConfig
from octavo.ops.contract import Array, Ops, Rope
from octavo.types import KVGroup


class MLP(Protocol):
    def __call__(self, ops: Ops, x: Array, residual: Array | None) -> Array: ...


class Block(Layer):
    """One pre-norm transformer layer: x + attn(norm1(x)), then x + mlp(norm2(x)).

    With `post1`/`post2` the branch is normed again before it is added (Gemma 2 and 3).
    """

    def __init__(
        self,
        norm1: RMSNorm,
        attn: Attention,
        norm2: RMSNorm,
        mlp: MLP,
        post1: RMSNorm | None = None,
        post2: RMSNorm | None = None,
    ):
        self.norm1, self.attn, self.post1 = norm1, attn, post1
        self.norm2, self.mlp, self.post2 = norm2, mlp, post2

    def __call__(self, ops: Ops, batch: Any, x: Array, rotary: Array | None) -> Array:
        y = self.attn(ops, batch, self.norm1(ops, x), rotary, None if self.post1 else x)
        x = self.post1(ops, y, residual=x) if self.post1 else y
        y = self.mlp(ops, self.norm2(ops, x), None if self.post2 else x)
        return self.post2(ops, y, residual=x) if self.post2 else y


class Decoder(Layer):
    """A decoder-only language model: token ids to hidden rows (`body`), hidden rows to logits (`head`).

    `block(i)` makes layer i. Layers of one window size share a KV group; full attention, where present, is group 0.
    A tied model has no `lm_head` leaf: its head multiplies by the embedding table.
    """

    def __init__(
        self,
        config: ModelConfig,
        block: Callable[[int], Block],
        norm: RMSNorm,
        *,
        embed_scale: float = 1.0,
        logit_softcap: float = 0.0,
    ):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, embed_scale)
        self.blocks = [block(i) for i in range(config.layers)]
        self.norm = norm
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, {"": config.vocab_size})
        self.logit_softcap = logit_softcap
        windows = [b.attn.window for b in self.blocks]
        kinds = sorted(set(windows))
        self.groups = tuple(KVGroup(tuple(i for i, w in enumerate(windows) if w == kind), kind) for kind in kinds)
        for i, b in enumerate(self.blocks):
            b.attn.place(i, kinds.index(windows[i]))

    def body(self, ops: Ops, batch: Any) -> Array:
        """[R, hidden]: hidden rows, before the final norm, where the batch wants an output."""
        rotaries: dict[Rope, Array] = {}
        x = self.embed(ops, batch)
        for block in self.blocks:
            rope = block.attn.rope
            if rope is not None and rope not in rotaries:
                rotaries[rope] = ops.rotary(batch, rope)
            x = block(ops, batch, x, rotaries[rope] if rope is not None else None)
        return ops.gather(batch, x)

    def head(self, ops: Ops, x: Array) -> Array:
        """[R, vocab]: logits of the hidden rows."""
        weight = self.embed.weight if self.lm_head is None else self.lm_head.weight
        return ops.logits(self.norm(ops, x), weight, self.logit_softcap)
