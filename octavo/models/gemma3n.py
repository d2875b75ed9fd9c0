"""Gemma 3n text: four streams of hidden rows of which a layer computes one, embeddings of each layer's own, a low-rank
residual beside attention, sparse activations, and last layers that read the keys and values of earlier ones.

Google DeepMind, "Gemma 3n" (release, 2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from octavo.layers.altup import AltUp, Laurel, Streams
from octavo.layers.attention import Attention, SharedAttention
from octavo.layers.linear import Embedding, Layer, Linear, Need, Value, matrices, vectors
from octavo.layers.mlp import GatedMLP, SparseMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rope import make_rope
from octavo.layers.views import Columns, part, scaled_columns, take_rows
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words
from octavo.models.decoder import Decoder
from octavo.models.names import LLAMA, QK_NORM, Names, but
from octavo.ops.contract import Array, Device, Ops, Rope

DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
}
"""Of transformers' Gemma3nTextConfig."""

ROOT = 2**-0.5


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = in_common_words(raw, DEFAULTS)
    layers, inner = out.get("num_hidden_layers", 0), out.get("intermediate_size")
    out["inner_sizes"] = inner if isinstance(inner, list) else [inner] * layers
    out["intermediate_size"] = inner[0] if isinstance(inner, list) and inner else inner
    if out.get("layer_types") is None:
        out["layer_types"] = ["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(layers)]
    if out.get("activation_sparsity_pattern") is None:
        sparse = 10 if layers > 10 else 0
        out["activation_sparsity_pattern"] = [0.95] * sparse + [0.0] * (layers - sparse)
    return out


def make(c: ModelConfig, max_model_len: int) -> Decoder:
    for key in ("inner_sizes", "activation_sparsity_pattern"):
        given = c.raw[key]
        if not isinstance(given, list) or len(given) != c.layers:
            raise ModelConfigError(f"{key.replace('inner_sizes', 'intermediate_size')} needs a value for each layer")
    if c.raw.get("use_bidirectional_attention"):
        raise ModelConfigError("use_bidirectional_attention = true is not supported")
    ropes = _ropes(c, max_model_len)
    return StreamDecoder(c, lambda i: StreamBlock(c, i, ropes[c.layer_types[i]], _source(c, i)))


def _ropes(c: ModelConfig, max_model_len: int) -> dict[str, Rope]:
    """By kind of layer, from either spelling of the config."""
    nested = c.raw.get("rope_parameters") or {}
    full = {"rope_theta": c.raw.get("rope_theta", 1e6), **(c.raw.get("rope_scaling") or {})}
    local = {"rope_theta": c.raw.get("rope_local_base_freq", 1e4)}
    return {
        kind: make_rope({**old, **(nested.get(kind) or {})}, c.head_dim, c.max_position_embeddings, max_model_len)
        for kind, old in (("full_attention", full), ("sliding_attention", local))
    }


def _source(c: ModelConfig, i: int) -> int | None:
    """The layer whose keys and values layer i reads instead of having its own: the last one of its kind that has."""
    first = c.layers - c.number("num_kv_shared_layers", 0)
    if i < first:
        return None
    own = [j for j in range(first) if c.layer_types[j] == c.layer_types[i]]
    if not own:
        raise ModelConfigError(f"num_kv_shared_layers = {c.layers - first} leaves no {c.layer_types[i]} layer to share")
    return own[-1]


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
        shape = (c.heads, c.kv_heads, c.head_dim, rope)
        more: dict[str, Any] = {
            "window": c.windows[i],
            "scale": 1.0,
            "bias": c.attention_bias,
            "out_bias": c.attention_bias,
            "q_norm": RMSNorm(c.head_dim, c.eps),
            "k_norm": RMSNorm(c.head_dim, c.eps),
            "v_norm": RMSNorm(c.head_dim, c.eps, learned=False),
        }
        self.attn = (
            Attention(hidden, *shape, **more) if source is None else SharedAttention(hidden, source, *shape, **more)
        )
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
            logit_softcap=float(c.raw["final_logit_softcapping"] or 0.0),
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


def names(c: ModelConfig) -> Names:
    width, layer = c.number("hidden_size_per_layer_input"), "model.layers.{i}."
    every = c.layers * width
    own = [
        row
        for i in range(c.layers)
        for row in (
            ("model.embed_tokens_per_layer", f"blocks.{i}.input.embed", Columns(i * width, width, every)),
            ("model.per_layer_model_projection", f"blocks.{i}.input.project", part(i * width, width, every)),
        )
    ]
    further = range(c.number("altup_num_inputs") - 1)
    return (
        *but(
            LLAMA,
            (layer + "post_attention_layernorm", "blocks.{i}.post1"),
            (layer + "pre_feedforward_layernorm", "blocks.{i}.norm2"),
            (layer + "post_feedforward_layernorm", "blocks.{i}.post2"),
        ),
        *QK_NORM,
        *own,
        ("model.per_layer_projection_norm", "blocks.{i}.input.norm"),
        *((f"model.altup_projections.{k}", f"spread.{k}") for k in further),
        *((f"model.altup_unembed_projections.{k}", f"join.{k}") for k in further),
        (layer + "mlp.{gate,up}_proj", "blocks.{i}.mlp.{gate,up}"),
        (layer + "altup.router_norm", "blocks.{i}.altup.norm"),
        (layer + "altup.modality_router", "blocks.{i}.altup.router"),
        (layer + "altup.{prediction,correction}_coefs", "blocks.{i}.altup.{prediction,correction}"),
        (layer + "altup.correct_output_scale", "blocks.{i}.gate.scale"),
        (layer + "laurel.linear_{left,right}", "blocks.{i}.laurel.{left,right}"),
        (layer + "laurel.post_laurel_norm", "blocks.{i}.laurel.norm"),
        (layer + "per_layer_input_gate", "blocks.{i}.gate"),
        (layer + "per_layer_projection", "blocks.{i}.project"),
        (layer + "post_per_layer_input_norm", "blocks.{i}.post3"),
    )


def ignore(c: ModelConfig) -> tuple[str, ...]:
    """Published files have keys and values for layers that read others'."""
    shared = range(c.layers - c.number("num_kv_shared_layers", 0), c.layers)
    unused = [
        f"model.layers.{i}.self_attn.{word}.*" for i in shared for word in ("k_proj", "v_proj", "k_norm", "v_norm")
    ]
    return (*unused, *(() if c.raw["altup_correct_scale"] else ("*.altup.correct_output_scale",)))
