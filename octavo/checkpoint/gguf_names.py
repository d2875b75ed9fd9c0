"""Names of tensors: GGUF's, and the Hugging Face names a model loader asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class Names(NamedTuple):
    """Where the tensors of an architecture lie in its Hugging Face layout.

    Names are without their ending (.weight, .bias), unless the ending is not the same in both; a key in full comes
    before the key without.
    """

    top: Mapping[str, str]
    layer: Mapping[str, str]
    """What follows `blk.N.` -> what follows `prefix`N."""
    prefix: str = "model.layers."

    def but(self, **layer: str) -> Names:
        """The same with these parts of a layer in place of those of the same names, or in addition."""
        return self._replace(layer={**self.layer, **layer})

    def hugging_face(self, name: str) -> str:
        """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name comes back as it is."""
        match = _PATTERN.fullmatch(name)
        if match is None:
            return name
        layer, part, ending = match.groups()
        table, before = (self.top, "") if layer is None else (self.layer, f"{self.prefix}{layer}.")
        if f"{part}.{ending}" in table:
            return before + table[f"{part}.{ending}"]
        return f"{before}{table[part]}.{ending}" if part in table else name


_PATTERN = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")

LLAMA = Names(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    {
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
    },
)
"""The layout of most families."""

EXPERTS = LLAMA.but(
    **{
        "ffn_gate_inp": "mlp.gate",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
        "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }
)
"""With mixtures of experts; those of a layer are a stack in GGUF files."""

BEHIND = LLAMA.but(
    post_attention_norm="post_attention_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
"""With norms behind each branch instead of before (OLMo 2, EXAONE 4)."""

SANDWICH = LLAMA.but(
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
"""With norms before and after each branch (Gemma 2 and 3)."""
