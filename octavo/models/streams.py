"""A decoder of several streams of hidden rows (AltUp), of which each layer computes one: the blocks of Gemma 3n."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from octavo.layers.altup import AltUp, Laurel, Streams
from octavo.layers.attention import Attention, SharedAttention
from octavo.layers.linear import Embedding, Layer, Linear, Need, Value, matrices, vectors
from octavo.layers.mlp import GatedMLP, SparseMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.views import scaled_columns, take_rows
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.ops.contract import Array, Device, Ops, Rope

ROOT = 2**-0.5


class ShorterEmbedding(Embedding):
    """A table without the last ids of the vocabulary, which all have its first row."""

    def __init__(self, rows: int, vocab: int, width: int, scale: float):
        super().__init__(rows, width, scale)
        self.missing = max(0, vocab - rows)

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        [table] = matrices(values)
        rest = take_rows(table, np.zeros(self.missing, np.int64))
        self.weight = device.weight([table, rest] if self.missing else [table])


class LayerInput(Layer):
    """[T, width]: what a token means to one layer, from a table of its own and from the model's embedding of it."""

    def __init__(self, c: ModelConfig):
        width, rows = c.number("hidden_size_per_layer_input"), c.number("vocab_size_per_layer_input")
        self.embed = ShorterEmbedding(rows, c.vocab_size, width, float(np.float32(width**0.5)))
        self.project = Linear(c.hidden_size, {"": width}, scale=c.hidden_size**-0.5)
        self.norm = RMSNorm(width, c.eps)

    def __call__(self, ops: Ops, batch: Any, embedded: Array) -> Array:
        return ops.add(self.norm(ops, self.project(ops, embedded)), self.embed(ops, batch), ROOT)


class ScaledLinear(Linear):
    """W (s * x), with a learned vector s that is multiplied into W at load."""

    def needs(self) -> list[Need]:
        return [*super().needs(), Need("", ".scale", (self.n_in,), matrix=False)]

    def fill(self, device: Device, values: Iterable[tuple[Need, Value]], style: str) -> None:
        read = list(values)
        [weight], [scale] = matrices(read), vectors(read)
        self.weight = device.weight([scaled_columns(weight, scale)])


class StreamBlock(Layer):
    """(embedding, streams) -> the same: one stream goes through attention and MLP, and all are corrected by it."""

    def __init__(self, c: ModelConfig, i: int, rope: Rope, source: int | None):
        hidden, width = c.hidden_size, c.number("hidden_size_per_layer_input")
        inner, sparsity = c.raw["inner_sizes"][i], c.raw["activation_sparsity_pattern"][i]
        self.activation = c.activation
        self.altup = AltUp(hidden, c.number("altup_num_inputs"), c.number("altup_active_idx", 0), c.eps)
        self.norm1 = RMSNorm(hidden, c.eps)
        self.laurel = Laurel(hidden, c.number("laurel_rank"), c.eps)
        more: dict[str, Any] = {
            "window": c.windows[i],
            "scale": 1.0,
            "bias": c.attention_bias,
            "out_bias": c.attention_bias,
            "q_norm": RMSNorm(c.head_dim, c.eps),
            "k_norm": RMSNorm(c.head_dim, c.eps),
            "v_norm": RMSNorm(c.head_dim, c.eps, learned=False),
        }
        sizes = c.attention
        self.attn = Attention(sizes, rope, **more) if source is None else SharedAttention(source, sizes, rope, **more)
        self.post1 = RMSNorm(hidden, c.eps)
        self.norm2 = RMSNorm(hidden, c.eps)
        self.mlp = (
            SparseMLP(hidden, inner, c.activation, sparsity) if sparsity else GatedMLP(hidden, inner, c.activation)
        )
        self.post2 = RMSNorm(hidden, c.eps)
        self.input = LayerInput(c)
        self.gate = (ScaledLinear if c.raw["altup_correct_scale"] else Linear)(hidden, {"": width})
        self.project = Linear(width, {"": hidden})
        self.post3 = RMSNorm(hidden, c.eps)

    def __call__(self, ops: Ops, batch: Any, x: tuple[Array, Streams], rotary: Array | None) -> tuple[Array, Streams]:
        embedded, streams = x
        predicted = self.altup.predict(ops, streams)
        active = predicted[self.altup.active]
        normed = self.norm1(ops, active)
        y = self.post1(ops, self.attn(ops, batch, normed, rotary, None), residual=active)
        y = ops.add(y, self.laurel(ops, normed), ROOT)
        y = self.post2(ops, self.mlp(ops, self.norm2(ops, y), None), residual=y)
        first, *others = self.altup.correct(ops, predicted, y)
        gate = self.gate(ops, (first, *others)[self.altup.active])
        gated = ops.activate(gate, self.activation, times=self.input(ops, batch, embedded))
        more = self.post3(ops, self.project(ops, gated))
        return embedded, (first, *(ops.add(stream, more) for stream in others))


class StreamDecoder(Decoder):
    """Each further stream begins as a projection of the embedding and ends in one, of the first stream's magnitude;
    what leaves is their mean."""

    def __init__(self, c: ModelConfig, block: Any):
        super().__init__(
            c,
            block,
            RMSNorm(c.hidden_size, c.eps),
            embed_scale=float(np.float32(c.hidden_size**0.5)),
            logit_softcap=c.real("final_logit_softcapping", 0.0),
        )
        further = range(c.number("altup_num_inputs") - 1)
        self.spread = [Linear(c.hidden_size, {"": c.hidden_size}) for _ in further]
        self.join = [Linear(c.hidden_size, {"": c.hidden_size}) for _ in further]

    def enter(self, ops: Ops, batch: Any) -> tuple[Array, Streams]:
        x = super().enter(ops, batch)
        return x, (x, *(ops.match_rms(spread(ops, x), x, 1e-5) for spread in self.spread))

    def leave(self, ops: Ops, x: tuple[Array, Streams]) -> Array:
        first, *others = x[1]
        total = first
        for i, (join, stream) in enumerate(zip(self.join, others, strict=True), 1):
            scale = 1 / len(x[1]) if i == len(others) else 1.0
            total = ops.add(total, ops.match_rms(join(ops, stream), first, 1e-5), scale)
        return total
