"""The text model inside a model of images and text."""

from __future__ import annotations

from typing import Any

from octavo.checkpoint.tensor import Tensor

_GEMMA3_DEFAULTS = {
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
}
"""What the published files leave out of their text_config (the defaults of transformers' Gemma3TextConfig)."""

_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_IMAGE_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def text_model(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Configuration and tensors of the text model of Gemma 3 with images; everything else comes back as it is."""
    text = config.get("text_config")
    if config.get("architectures") != ["Gemma3ForConditionalGeneration"] or not isinstance(text, dict):
        return config, tensors
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    merged = {**_GEMMA3_DEFAULTS, **ids, **text, "architectures": ["Gemma3ForCausalLM"]}
    if "rope_parameters" in text:
        del merged["rope_theta"], merged["rope_local_base_freq"]
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(_IMAGE_PARTS):
            old, new = next((pair for pair in _PREFIXES if name.startswith(pair[0])), ("", ""))
            named[new + name[len(old) :]] = tensor
    return merged, named
