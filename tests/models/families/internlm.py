"""InternLM 2 and 3. transformers runs InternLM 3 as a Llama and does not have InternLM 2, which is one as well: its
layout (tensor names, q, k and v in one matrix by KV head, keys of the config) is that of modeling_internlm2.py in the
repositories of the models."""

from typing import Any

import numpy as np

from tests.models.variant import Variant


def internlm2(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    config["architectures"], config["model_type"] = ["InternLM2ForCausalLM"], "internlm2"
    config["bias"] = config.pop("attention_bias")
    config.pop("mlp_bias")
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope["rope_theta"]
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    names = {
        "embed_tokens": "tok_embeddings",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "lm_head": "output",
    }
    for i in range(config["num_hidden_layers"]):
        for ending in ("weight", "bias"):
            if f"model.layers.{i}.self_attn.q_proj.{ending}" in tensors:
                q, k, v = (tensors.pop(f"model.layers.{i}.self_attn.{x}_proj.{ending}") for x in "qkv")
                rest = q.shape[1:]
                groups = [
                    q.reshape(kv_heads, heads // kv_heads, -1, *rest),
                    k.reshape(kv_heads, 1, -1, *rest),
                    v.reshape(kv_heads, 1, -1, *rest),
                ]
                fused = np.concatenate(groups, axis=1).reshape(-1, *rest)
                tensors[f"model.layers.{i}.attention.wqkv.{ending}"] = fused
    for name in list(tensors):
        for theirs, ours in names.items():
            if theirs in name:
                tensors[name.replace(theirs, ours)] = tensors.pop(name)


def internlm3(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """As InternLM's own code writes it."""
    config["architectures"], config["model_type"] = ["InternLM3ForCausalLM"], "internlm3"
    config["qkv_bias"], config["bias"] = config.pop("attention_bias"), config.pop("mlp_bias")


def internlm3_now(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """As transformers writes it, but for the architecture, which is a Llama's there."""
    config["architectures"] = ["InternLM3ForCausalLM"]


VARIANTS = {
    "internlm2": Variant("Llama", rewrite=internlm2),
    "internlm2-bias": Variant("Llama", {"attention_bias": True, "num_key_value_heads": 1}, rewrite=internlm2),
    "internlm3": Variant("Llama", {"head_dim": 32}, rewrite=internlm3),
    "internlm3-biases": Variant("Llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}, rewrite=internlm3),
    "internlm3-now": Variant(
        "InternLM3",
        {"head_dim": 32, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        model="LlamaForCausalLM",
        rewrite=internlm3_now,
    ),
}
