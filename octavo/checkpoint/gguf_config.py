"""What a GGUF file's metadata says, in the words of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.gguf_families import FAMILIES, Family
from octavo.checkpoint.gguf_metadata import Metadata


def family_of(meta: Metadata) -> Family:
    """How to read the file's architecture. Raises CheckpointError when it is unknown."""
    if meta.architecture not in FAMILIES:
        raise CheckpointError(
            f"{meta.path} has the architecture {meta.architecture!r}; known are {', '.join(FAMILIES)}."
        )
    return FAMILIES[meta.architecture]


_WORDS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
"""Metadata of any family -> config.json."""

_EXPERT_WORDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
"""Likewise, where there are experts."""


def translate(meta: Metadata, family: Family) -> dict[str, Any]:
    """config.json for the model of a file. Raises CheckpointError for missing or impossible values."""
    path, shapes = meta.path, meta.shapes
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    layers = meta.layers
    if not hidden or not heads or not layers:
        raise CheckpointError(
            f"{path}: embedding_length, head_count and block_count must be positive, not {hidden}, "
            f"{heads} and {layers}. Convert the model again."
        )
    if layers > len(shapes):
        raise CheckpointError(
            f"{path} announces {layers} layers but only {len(shapes)} tensors. Convert the model again."
        )
    head_dim = meta.integer("rope.dimension_count" if family.latent else "attention.key_length", hidden // heads)
    if not family.latent and meta.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{path}: keys and values of different sizes ({head_dim} and "
            f"{meta.own('attention.value_length')}) are not supported."
        )
    embedding = shapes.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{path} has no tensor 'token_embd.weight': it is not a whole language model.")
    config: dict[str, Any] = {
        "architectures": [family.name],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": meta.width("ffn_down.weight") or meta.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number(family.eps),
        "max_position_embeddings": meta.integer("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_act": "silu",
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
    }
    rotated = meta.integer("rope.dimension_count", head_dim)
    if meta.own("rope.dimension_count") is not None:
        config["partial_rotary_factor"] = rotated / head_dim
    config.update(_rotary(meta, config, rotated // 2))
    config.update({word: meta.has(part) for word, part in family.switches.items()})
    words = {**_WORDS, **(_EXPERT_WORDS if meta.plain("expert_count") else {}), **family.words}
    for key, word in words.items():
        value = meta.plain(key)
        if value is not None and (value or not isinstance(value, float)):  # a multiplier of 0 means none
            config[word] = value
    if "num_experts" in config:
        config["moe_intermediate_size"] = meta.width("ffn_down_exps.weight")
    config.update(family.constants)
    if family.more is not None:
        config.update(family.more(meta, config))
    config.update(_special_ids(meta.values))
    return config


def _rope_scaling(meta: Metadata) -> dict[str, Any] | None:
    """The rope.scaling.* keys; None when the file has none or says "none"."""
    factor = meta.own("rope.scaling.factor") or meta.own("rope.scale_linear")
    kind = meta.own("rope.scaling.type") or ("linear" if factor else "none")
    if kind == "none" or (kind == "linear" and (not factor or factor == 1)):
        return None
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, word in (
        ("factor", "factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("attn_factor", "attention_factor"),
        ("yarn_attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = meta.own(f"rope.scaling.{key}")
        if value:
            scaling[word] = value
    if kind == "yarn" and meta.own("rope.scaling.yarn_log_multiplier") is not None:
        scaling["mscale"] = 1.0
        scaling["mscale_all_dim"] = meta.number("rope.scaling.yarn_log_multiplier")
    if factor:
        scaling["factor"] = meta.number("rope.scaling.factor", factor)
    return scaling


def _rotary(meta: Metadata, config: dict[str, Any], count: int) -> dict[str, Any]:
    """What the tensors about RoPE say: one divides each of the `count` rotary frequencies (Llama 3), or two do for
    short and long contexts (Phi 3)."""
    for name, values in meta.rotary.items():
        if len(values) != count:
            raise CheckpointError(
                f"{meta.path}: '{name}.weight' has the shape [{len(values)}] where [{count}] was expected. Convert the "
                f"model again."
            )
        if not all(value > 0 for value in values):
            raise CheckpointError(f"{meta.path}: '{name}.weight' must hold positive numbers. Convert the model again.")
    out: dict[str, Any] = {}
    if "rope_freqs" in meta.rotary:
        out["rope_freq_factors"] = meta.rotary["rope_freqs"]
    if "rope_factors_long" in meta.rotary and "rope_factors_short" in meta.rotary:
        out["rope_scaling"] = {
            **(config["rope_scaling"] or {}),
            "rope_type": "longrope",
            "long_factor": meta.rotary["rope_factors_long"],
            "short_factor": meta.rotary["rope_factors_short"],
            "original_max_position_embeddings": meta.integer("rope.scaling.original_context_length"),
        }
        if meta.own("rope.scaling.attn_factor") is not None:
            out["rope_scaling"]["attention_factor"] = meta.number("rope.scaling.attn_factor")
    return out


def _special_ids(values: Mapping[str, Any]) -> dict[str, int]:
    ids = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
    found = {word: values.get(f"tokenizer.ggml.{key}_token_id") for word, key in ids.items()}
    return {word: token for word, token in found.items() if type(token) is int}


def generation(values: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json for a file: every id that ends a text (end of text, of turn, of message), and the
    sampling parameters that newer files recommend; {} when the metadata has none of these."""
    ends = [values.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    found: dict[str, Any] = {}
    ids = list(dict.fromkeys(token for token in ends if type(token) is int))
    if ids:
        found["eos_token_id"] = ids
    for key, word in (
        ("temp", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("penalty_repeat", "repetition_penalty"),
    ):
        value = values.get(f"general.sampling.{key}")
        if type(value) in (int, float):
            found[word] = value
    if "temperature" in found:
        found["do_sample"] = found["temperature"] > 0
    return found
