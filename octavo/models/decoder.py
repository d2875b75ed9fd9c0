"""Block and Decoder: the only forward over layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from octavo.layers.linear import Embedding, Layer, Linear, Positions
from octavo.layers.norm import Norm
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.ops.contract import Array, KVShape, Ops, Rope
from octavo.types import KVGroup


class AttentionLayer(Protocol):
    """What a decoder asks of an attention layer."""

    rope: Rope | None
    window: int
    chunk: int

    @property
    def source(self) -> int | None:
        """The layer whose keys and values it reads; None: it has its own."""

    @property
    def kv(self) -> KVShape: ...

    def place(self, cache: int, group: int) -> None: ...

    def __call__(self, ops: Ops, batch: Any, x: Array, rotary: Array | None, residual: Array | None) -> Array: ...


class MLP(Protocol):
    def __call__(self, ops: Ops, x: Array, residual: Array | None) -> Array: ...


class AnyBlock(Protocol):
    """A layer of a decoder: a `Layer` with an attention layer in it. `x` is an Array, or what `Decoder.enter` makes."""

    attn: AttentionLayer

    def __call__(self, ops: Ops, batch: Any, x: Any, rotary: Array | None) -> Any: ...


class Block(Layer):
    """One transformer layer: x + attn(norm1(x)), then x + mlp(norm2(x)).

    With `post1`/`post2` the branch is normed again before it is added (Gemma 2 and 3); without `norm1`/`norm2` it is
    not normed before (OLMo 2). `parallel`: both branches start from x; without `norm2` the MLP then takes norm1(x)
    (GPT-J, Cohere), otherwise norm2(x) (GPT-NeoX).
    """

    def __init__(
        self,
        norm1: Norm | None,
        attn: AttentionLayer,
        norm2: Norm | None,
        mlp: MLP,
        post1: Norm | None = None,
        post2: Norm | None = None,
        *,
        parallel: bool = False,
    ):
        self.norm1, self.attn, self.post1 = norm1, attn, post1
        self.norm2, self.mlp, self.post2 = norm2, mlp, post2
        self.parallel = parallel

    def __call__(self, ops: Ops, batch: Any, x: Array, rotary: Array | None) -> Array:
        normed = self.norm1(ops, x) if self.norm1 else x
        y = self.attn(ops, batch, normed, rotary, None if self.post1 else x)
        y = self.post1(ops, y, residual=x) if self.post1 else y
        if not self.parallel:
            normed = self.norm2(ops, y) if self.norm2 else y
        elif self.norm2:
            normed = self.norm2(ops, x)
        z = self.mlp(ops, normed, None if self.post2 else y)
        return self.post2(ops, z, residual=y) if self.post2 else z


class Decoder(Layer):
    """A decoder-only language model: token ids to hidden rows (`body`), hidden rows to logits (`head`).

    `block(i)` makes layer i. Layers that see the same part of the context share a KV group; full attention, where
    present, is group 0. A tied model has no `lm_head` leaf: its head multiplies by the embedding table.

    `positions`: learned embeddings, added to those of the tokens; `embed_width`: of the token embeddings where it is
    not the hidden size (OPT-350m: a projection on either side); `embed_norm` norms the sum. `norm` None: none before
    the head. `logit_scale` multiplies the logits (bias included), `logit_softcap` bounds them.
    """

    def __init__(
        self,
        config: ModelConfig,
        block: Callable[[int], AnyBlock],
        norm: Norm | None,
        *,
        embed_scale: float = 1.0,
        embed_width: int | None = None,
        embed_norm: Norm | None = None,
        positions: Positions | None = None,
        logit_scale: float = 1.0,
        logit_softcap: float = 0.0,
        head_bias: bool | None = False,
    ):
        self.config = config
        hidden, width = config.hidden_size, embed_width or config.hidden_size
        self.embed = Embedding(config.vocab_size, width, embed_scale)
        self.project_in = Linear(width, {"": hidden}) if width != hidden else None
        self.positions = positions
        self.embed_norm = embed_norm
        self.blocks = [block(i) for i in range(config.layers)]
        self.norm = norm
        self.project_out = Linear(hidden, {"": width}) if width != hidden else None
        self.lm_head = None if config.tie_word_embeddings else Linear(width, {"": config.vocab_size}, head_bias)
        self.logit_scale, self.logit_softcap = logit_scale, logit_softcap
        spans = [b.attn.window or b.attn.chunk for b in self.blocks]
        kinds = sorted(set(spans))
        owners = [i for i, b in enumerate(self.blocks) if b.attn.source is None]
        self.groups = tuple(KVGroup(tuple(n for n, i in enumerate(owners) if spans[i] == kind), kind) for kind in kinds)
        self.caches = tuple(owners)
        """Of each KV cache the layer that writes it."""
        for i, b in enumerate(self.blocks):
            source = i if b.attn.source is None else b.attn.source
            b.attn.place(owners.index(source), kinds.index(spans[i]))
        shapes = {b.attn.kv for b in self.blocks}
        if len(shapes) > 1:
            raise ModelConfigError(f"layers with KV caches of different shapes are not supported: {sorted(shapes)}")

    @property
    def kv(self) -> KVShape:
        """What each layer keeps of a token."""
        return self.blocks[0].attn.kv

    def body(self, ops: Ops, batch: Any) -> Array:
        """[R, hidden]: hidden rows, before the final norm, where the batch wants an output."""
        rotaries: dict[Rope, Array] = {}
        x = self.enter(ops, batch)
        for block in self.blocks:
            rope = block.attn.rope
            if rope is not None and rope not in rotaries:
                rotaries[rope] = ops.rotary(batch, rope)
            x = block(ops, batch, x, rotaries[rope] if rope is not None else None)
        return ops.gather(batch, self.leave(ops, x))

    def enter(self, ops: Ops, batch: Any) -> Any:
        """What the first layer takes; each takes what the one before gives."""
        x = self.embed(ops, batch)
        if self.project_in is not None:
            x = self.project_in(ops, x)
        if self.positions is not None:
            x = self.positions.add(ops, batch, x)
        if self.embed_norm is not None:
            x = self.embed_norm(ops, x)
        return x

    def leave(self, ops: Ops, x: Any) -> Array:
        """[T, hidden] of what the last layer gives."""
        out: Array = x
        return out

    def head(self, ops: Ops, x: Array) -> Array:
        """[R, vocab]: logits of the hidden rows."""
        if self.norm is not None:
            x = self.norm(ops, x)
        if self.project_out is not None:
            x = self.project_out(ops, x)
        weight, bias = (self.embed.weight, None) if self.lm_head is None else (self.lm_head.weight, self.lm_head.bias)
        return ops.logits(x, weight, self.logit_softcap, self.logit_scale, bias)
