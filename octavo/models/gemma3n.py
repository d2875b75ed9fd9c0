"""Gemma 3n text: four streams of hidden rows of which a layer computes one, embeddings of each layer's own, a low-rank
residual beside attention, sparse activations, and last layers that read the keys and values of earlier ones.

Google DeepMind, "Gemma 3n" (release, 2025).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.layers.rope import make_rope
from octavo.layers.views import Columns, part
from octavo.models.config import ModelConfig, ModelConfigError, in_common_words, whole
from octavo.models.decoder import Decoder
from octavo.models.gemma import refuse_bidirectional
from octavo.models.names import LLAMA, QK_NORM, SANDWICH, Names, but
from octavo.models.streams import StreamBlock, StreamDecoder
from octavo.ops.contract import Rope

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


def rewrite(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    out = in_common_words(raw, DEFAULTS)
    layers, inner = whole(out, "num_hidden_layers", 0), out.get("intermediate_size")
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
    refuse_bidirectional(c)
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
            *SANDWICH,
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
