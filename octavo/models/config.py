"""ModelConfig: what a checkpoint says about its model, in one vocabulary for every family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from octavo.layers.attention import Sizes
from octavo.ops.contract import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
"""config.json's words for activation functions."""

WORDS: dict[str, tuple[str, ...]] = {
    "rms_norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "norm_eps",
        "norm_epsilon",
    ),
    "hidden_act": ("hidden_activation", "hidden_act", "activation_function"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
}
"""Spellings of what families agree on in all but the name; the first that is set counts."""


MOST_EXPERTS = 50_000
"""Layers times experts per layer, above which a config is taken for broken: the largest published have 25,000."""

_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_nextn_predict_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "num_kv_heads")
_WIDTHS = (
    *("hidden_size", "n_embd", "n_embed", "d_model", "intermediate_size", "hidden_size_per_layer_input"),
    *("head_dim", "attention_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("kv_lora_rank", "q_lora_rank"),
)

LIMITS: dict[str, int] = {
    **dict.fromkeys((*_LAYERS, *_HEADS, *WORDS["experts"], "altup_num_inputs"), 10_000),
    **dict.fromkeys(_WIDTHS, 1_000_000),
}
"""More of these is a broken file: a model is refused before it is laid out in memory. No other number is above 2^31."""

LISTS = ("layer_types", "no_rope_layers", "moe_layers", "mlp_only_layers", "activation_sparsity_pattern")
MAPPINGS = ("rope_scaling", "rope_parameters", "attn_config", "ffn_config", "sparse_config")
"""Keys of config.json that hold no plain value, in every family that has them."""


class ModelConfigError(ValueError):
    """config.json (or the GGUF header) lacks something, or says something this version cannot run."""


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a decoder-only model. Sizes are counts of elements.

    `raw` is the checkpoint's own config for what only one architecture reads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    activation: Activation
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: Mapping[str, Any]
    """RoPE parameters in transformers' names: rope_type, rope_theta, factor, …"""
    windows: tuple[int, ...]
    """Per layer the sliding window in tokens, the query's own included; 0 = full attention."""
    layer_types: tuple[str, ...]
    """Per layer config.json's word, "full_attention" where it has none."""
    experts: int
    """Routed experts per layer; 0: the model is dense."""
    attention_bias: bool | None
    """None: not said; a bias is then used where the checkpoint has one."""
    mlp_bias: bool | None
    raw: Mapping[str, Any]

    @classmethod
    def read(cls, raw: Mapping[str, Any], architecture: str) -> ModelConfig:
        """Read `raw` (the content of config.json). Raises ModelConfigError naming the key that is missing or wrong."""
        number = partial(whole, raw)
        hidden = number("hidden_size")
        heads = number("num_attention_heads")
        layers = number("num_hidden_layers")
        kv_heads = number("num_key_value_heads", heads, zero=False)
        head_dim = number("head_dim", 0) or hidden // heads
        experts = next((number(word) for word in WORDS["experts"] if raw.get(word)), 0)
        if layers * max(experts, 1) > MOST_EXPERTS:
            raise ModelConfigError(
                f"num_hidden_layers {layers} with {experts} experts each: more than {MOST_EXPERTS} cannot be right"
            )
        if heads % kv_heads:
            raise ModelConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
        if head_dim % 2 or not 0 < head_dim <= 1024:
            raise ModelConfigError(f"head_dim {head_dim} is not supported: it must be even, from 2 to 1024")
        name = str(next((raw[word] for word in WORDS["hidden_act"] if raw.get(word)), "silu"))
        if name not in ACTIVATIONS:
            raise ModelConfigError(f"activation {name!r} is not supported; known: {', '.join(sorted(ACTIVATIONS))}")
        return cls(
            architecture=architecture,
            vocab_size=number("vocab_size"),
            hidden_size=hidden,
            intermediate_size=number("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            eps=next((real(raw, word) for word in WORDS["rms_norm_eps"] if raw.get(word) is not None), 1e-6),
            activation=ACTIVATIONS[name],
            max_position_embeddings=number("max_position_embeddings", 2048, zero=False),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope=_rope(raw),
            windows=_windows(raw, layers),
            layer_types=tuple(raw.get("layer_types") or ("full_attention",) * layers),
            experts=experts,
            attention_bias=raw.get("attention_bias"),
            mlp_bias=raw.get("mlp_bias"),
            raw=raw,
        )

    def number(self, key: str, default: int | None = None, *, zero: bool = True) -> int:
        """A whole number that only one architecture reads, 0 (where `zero` allows it) or more; `default` where it is
        absent or null (None: it must be there and more than 0). Raises ModelConfigError."""
        return whole(self.raw, key, default, zero)

    def real(self, key: str, default: float | None = None, *, zero: bool = True) -> float:
        """A number that only one architecture reads, 0 (where `zero` allows it) or more; `default` where it is absent
        or null (None: it must be there). Raises ModelConfigError."""
        return real(self.raw, key, default, zero)

    @property
    def attention(self) -> Sizes:
        """What every attention layer of the model is made with."""
        return Sizes(self.hidden_size, self.heads, self.kv_heads, self.head_dim)

    def rope_of(self, layer_type: str) -> Mapping[str, Any]:
        """RoPE parameters of one kind of layer, where `rope_parameters` has an entry per kind; else those of all."""
        nested = (self.raw.get("rope_parameters") or {}).get(layer_type)
        return self.rope if nested is None else {**nested}


def check_kinds(raw: Mapping[str, Any]) -> None:
    """That what families read before it is a `ModelConfig` is of its kind. Raises ModelConfigError naming the key."""
    for keys, kind, word in ((LISTS, list, "a list"), (MAPPINGS, Mapping, "an object")):
        for key in keys:
            if raw.get(key) is not None and not isinstance(raw[key], kind):
                raise ModelConfigError(f"the model's config has {key} = {raw[key]!r}, {word} is needed")
    for key in LIMITS:
        if key != "intermediate_size":  # of Gemma 3n, a list
            whole(raw, key, 0)


def in_common_words(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], words: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """`raw` with `defaults` for the keys it lacks, and each key of `words` that it sets under its common word too.

    Defaults are those of the family's config class: a checkpoint's file may leave out what equals them.
    """
    out = {**defaults, **raw}
    for theirs, ours in (words or {}).items():
        if out.get(theirs) is not None:
            out[ours] = out[theirs]
    return out


def whole(raw: Mapping[str, Any], key: str, default: int | None = None, zero: bool = True) -> int:
    """See `ModelConfig.number`."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ModelConfigError(f"the model's config has no {key!r}: the file is incomplete or not a text model")
        return default
    if not _finite(value) or value != int(value) or value < 0:
        raise ModelConfigError(f"the model's config has {key} = {value!r}, a whole number is needed")
    if value == 0 and (default is None or not zero):
        raise ModelConfigError(f"the model's config has {key} = 0")
    limit = LIMITS.get(key, 2**31 - 1)
    if value > limit:
        raise ModelConfigError(f"the model's config has {key} = {value!r}, more than {limit} is not supported")
    return int(value)


def real(raw: Mapping[str, Any], key: str, default: float | None = None, zero: bool = True) -> float:
    """See `ModelConfig.real`."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not _finite(value) or value < 0 or value == 0 and not zero:
        needed = "a number of 0 or more" if zero else "a number above 0"
        raise ModelConfigError(f"the model's config has {key} = {value!r}, {needed} is needed")
    return float(value)


def _finite(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """RoPE parameters from either spelling: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)}
    rope.update(raw.get("rope_scaling") or {})
    given = raw.get("rope_parameters") or {}
    for kind in ("full_attention", "sliding_attention"):
        if given.get(kind) is not None and not isinstance(given[kind], Mapping):
            raise ModelConfigError(f"rope_parameters has {kind} = {given[kind]!r}, an object is needed")
    rope.update(given if "rope_type" in given or "rope_theta" in given else given.get("full_attention") or {})
    if "type" in rope and rope["rope_type"] == "default":  # the oldest spelling
        rope["rope_type"] = rope["type"]
    for key in ("rope_freq_factors", "partial_rotary_factor"):
        if raw.get(key) is not None:
            rope.setdefault(key, raw[key])
    theta = rope["rope_theta"]
    if not _finite(theta) or theta <= 0:
        raise ModelConfigError(f"rope_theta = {theta!r}, a positive number is needed")
    return rope


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Which layers slide: `layer_types` where given, otherwise `sliding_window` for all (Mistral) unless
    `use_sliding_window` is false (Qwen2, where layers below `max_window_layers` stay full)."""
    window = raw.get("sliding_window") or 0
    if not isinstance(window, int) or isinstance(window, bool) or not 0 <= window < 2**31:
        raise ModelConfigError(f"sliding_window = {window!r}, a whole number or null is needed")
    types = raw.get("layer_types")
    if types is not None:
        if len(types) != layers:
            raise ModelConfigError(f"layer_types lists {len(types)} layers, num_hidden_layers says {layers}")
        unknown = [kind for kind in types if kind not in ("sliding_attention", "full_attention", "chunked_attention")]
        if unknown:
            raise ModelConfigError(
                f"layer_types holds {unknown[0]!r}: only full, sliding and chunked attention are built"
            )
        if "sliding_attention" in types and not window:
            raise ModelConfigError("layer_types asks for sliding attention, but sliding_window is not set")
        return tuple(window if kind == "sliding_attention" else 0 for kind in types)
    if raw.get("use_sliding_window") is False:
        return (0,) * layers
    full = whole(raw, "max_window_layers", 0) if raw.get("use_sliding_window") else 0
    return tuple(0 if i < full else window for i in range(layers))
