"""The text model inside a model of images and text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.checkpoint.tensor import Tensor


class Wrapper(NamedTuple):
    """A model of several kinds of input, and what its text model is called."""

    text: str
    """Architecture of the text model."""
    defaults: Mapping[str, Any] = {}
    """What the published files leave out of their text_config (from transformers' class of it)."""
    prefixes: tuple[tuple[str, str], ...] = (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    )
    """Of tensors: (here, in the text model)."""
    others: tuple[str, ...] = ("vision_tower.", "multi_modal_projector.")
    """How the names of all other parts begin, with or without "model." before."""


WRAPPERS = {
    "Gemma3ForConditionalGeneration": Wrapper(
        "Gemma3ForCausalLM",
        {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma3nForConditionalGeneration": Wrapper(
        "Gemma3nForCausalLM", others=("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.")
    ),
    "Llama4ForConditionalGeneration": Wrapper("Llama4ForCausalLM", others=("vision_model.", "multi_modal_projector.")),
}
"""By name of the architecture."""


def text_model(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of the text model of one of `WRAPPERS`; everything else comes back as it is."""
    text = config.get("text_config")
    wrapper = next((WRAPPERS[name] for name in config.get("architectures") or [] if name in WRAPPERS), None)
    if wrapper is None or not isinstance(text, dict):
        return config, tensors
    outer = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
    kept = {key: config[key] for key in outer if key in config}
    merged = {**wrapper.defaults, **kept, **text, "architectures": [wrapper.text]}
    if "rope_parameters" in text:
        for key in ("rope_theta", "rope_local_base_freq"):
            merged.pop(key, None)
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.removeprefix("model.").startswith(wrapper.others):
            old, new = next((pair for pair in wrapper.prefixes if name.startswith(pair[0])), ("", ""))
            named[new + name[len(old) :]] = tensor
    return merged, named
