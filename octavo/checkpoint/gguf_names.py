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
        layer, part, expert, ending = match.groups()
        table, before = (self.top, "") if layer is None else (self.layer, f"{self.prefix}{layer}.")
        if expert is not None:
            part = f"{part}.{{e}}"
        if f"{part}.{ending}" in table:
            return before + table[f"{part}.{ending}"]
        return f"{before}{table[part]}.{ending}".replace("{e}", expert or "") if part in table else name


_PATTERN = re.compile(r"(?:blk\.(\d+)\.)?(\w+?)(?:\.(\d+))?\.(weight|bias)")

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
        "ffn_gate.{e}": "mlp.experts.{e}.gate_proj",
        "ffn_up.{e}": "mlp.experts.{e}.up_proj",
        "ffn_down.{e}": "mlp.experts.{e}.down_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }
)
"""With mixtures of experts; those of a layer are a stack, but in the first files of Mixtral tensors of their own."""

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

PHI = LLAMA._replace(top={**LLAMA.top, "output_norm": "model.final_layernorm"}).but(
    attn_qkv="self_attn.qkv_proj", attn_output="self_attn.dense", ffn_up="mlp.fc1", ffn_down="mlp.fc2"
)

FUSED = LLAMA.but(attn_qkv="self_attn.qkv_proj", ffn_up="mlp.gate_up_proj")
"""With gate and up in one matrix, and q, k and v in some (Phi 3, GLM 4)."""

GPT2 = Names(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    "transformer.h.",
)

GPT_NEOX = Names(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    "gpt_neox.layers.",
)

BLOOM = Names(
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        **GPT_NEOX.layer,
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
    },
    "transformer.h.",
)
"""Also Falcon's, whose models with two norms before their branches have other names for these."""

MPT = Names(
    {**GPT2.top, "output_norm": "transformer.norm_f"},
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
    "transformer.blocks.",
)

LATENT = EXPERTS.but(
    attn_q_a="self_attn.q_a_proj",
    attn_q_a_norm="self_attn.q_a_layernorm",
    attn_q_b="self_attn.q_b_proj",
    attn_kv_a_mqa="self_attn.kv_a_proj_with_mqa",
    attn_kv_a_norm="self_attn.kv_a_layernorm",
    attn_kv_b="self_attn.kv_b_proj",
    attn_k_b="self_attn.k_b_proj",
    attn_v_b="self_attn.v_b_proj",
)
"""With latent attention; files of late have the two parts of kv_b_proj apart, the first one turned."""

GEMMA3N = SANDWICH._replace(
    top={
        **LLAMA.top,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "altup_proj": "model.altup_projections",
        "altup_unembd_proj": "model.altup_unembed_projections",
    }
).but(
    **{
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale.weight": "altup.correct_output_scale",
    }
)
