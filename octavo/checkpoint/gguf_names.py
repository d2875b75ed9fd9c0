"""Names of tensors: GGUF's, and the Hugging Face names a model loader asks for."""

from __future__ import annotations

import re

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_GEMMA3_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

_PATTERN = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def hugging_face_name(architecture: str, name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name comes back as it is."""
    match = _PATTERN.fullmatch(name)
    if match is None:
        return name
    layer, part, ending = match.groups()
    if layer is None:
        return f"{_TOP[part]}.{ending}" if part in _TOP else name
    parts = _GEMMA3_LAYER if architecture == "gemma3" else _LAYER
    return f"model.layers.{layer}.{parts[part]}.{ending}" if part in parts else name
