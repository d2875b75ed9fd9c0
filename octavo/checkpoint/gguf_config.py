"""What a GGUF file's metadata says, in the words of Hugging Face's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.checkpoint.errors import CheckpointError

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
"""general.architecture -> (architecture, model_type) of config.json. Mistral models call themselves llama."""

_GEMMA3_LOCAL_BASE = 10000.0
_GEMMA3_PATTERN = 6
"""Every sixth layer sees all tokens; files do not say so."""
_GEMMA3_27B_LAYERS = 62
"""The one size whose softmax scale comes from hidden_size / heads instead of head_dim; files do not say so."""


class Metadata:
    """Typed look-ups in the metadata of one file; `own` keys are those that start with the architecture's name."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self.architecture = self.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{path} has the architecture {self.architecture!r}; known are {', '.join(ARCHITECTURES)}."
            )

    def text(self, key: str) -> str:
        value = self.values.get(key)
        if not isinstance(value, str):
            raise CheckpointError(
                f"{self.path}: the metadata {key!r} is {_said(value)}, not a text. Convert the model again."
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"{self.path}: the metadata '{self.architecture}.{key}' is {_said(value)}, not one "
                f"number. Convert the model again."
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(f"{self.architecture}.{key}", default)
        if type(value) not in (int, float):
            raise CheckpointError(
                f"{self.path}: the metadata '{self.architecture}.{key}' is {_said(value)}, not one "
                f"number. Convert the model again."
            )
        return float(value)

    def own(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")


def _said(value: Any) -> str:
    if value is None:
        return "missing"
    return f"an array of {len(value)}" if hasattr(value, "__len__") and not isinstance(value, str) else repr(value)


def translate(path: Path, values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """config.json for the model of a file; `shapes` are those of its tensors by Hugging Face name.

    Raises CheckpointError for an unknown architecture and for missing or impossible values.
    """
    meta = Metadata(path, values)
    name, model_type = ARCHITECTURES[meta.architecture]
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    layers = meta.integer("block_count")
    if not hidden or not heads or not layers:
        raise CheckpointError(
            f"{path}: embedding_length, head_count and block_count must be positive, not {hidden}, "
            f"{heads} and {layers}. Convert the model again."
        )
    if layers > len(shapes):
        raise CheckpointError(
            f"{path} announces {layers} layers but only {len(shapes)} tensors. Convert the model again."
        )
    head_dim = meta.integer("attention.key_length", hidden // heads)
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{path}: keys and values of different sizes ({head_dim} and "
            f"{meta.own('attention.value_length')}) are not supported."
        )
    embedding = shapes.get("model.embed_tokens.weight")
    if embedding is None:
        raise CheckpointError(f"{path} has no tensor 'token_embd.weight': it is not a whole language model.")
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": meta.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": meta.integer("context_length"),
        "vocab_size": embedding[0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "hidden_act": "silu",
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "rope_theta": meta.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
    }
    rotated = meta.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    for key, word in (
        ("attn_logit_softcapping", "attn_logit_softcapping"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("attention.sliding_window", "sliding_window"),
    ):
        if meta.own(key):
            config[word] = meta.own(key)
    if meta.architecture == "gemma3":
        config.update(_gemma3(meta, config))
    config.update(_special_ids(values))
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
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = meta.own(f"rope.scaling.{key}")
        if value:
            scaling[word] = value
    if factor:
        scaling["factor"] = meta.number("rope.scaling.factor", factor)
    return scaling


def _gemma3(meta: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """What is special to Gemma 3."""
    layers, pattern = config["num_hidden_layers"], meta.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    largest = layers == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": meta.number("rope.freq_base", 1000000.0),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE),
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta.integer("attention.sliding_window"),
        "sliding_window_pattern": pattern,
        "layer_types": [
            "full_attention" if pattern and (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)
        ],
    }


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
