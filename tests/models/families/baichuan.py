"""Baichuan, which transformers does not have.

It is a Llama whose attention, in the 13B models, has ALiBi instead of a rotation, and whose head, in Baichuan 2, has
rows of length 1 (modeling_baichuan.py in the repositories of the models); transformers' Llama is changed into one here.
"""

from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import AttentionInterface

from tests.models.variant import Variant


def alibi(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **others: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of heads [1, heads, tokens, size], each score lowered by slope * distance."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-8 * (2 * h + 1) / (2 * power)) for h in range(heads - power)]
    away = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    scores = query @ key.transpose(2, 3) * scaling + torch.tensor(slopes)[:, None, None] * away
    weights = scores.masked_fill(away > 0, -torch.inf).softmax(dim=-1)
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register("alibi", alibi)


def without_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq.zero_()
    model.set_attn_implementation("alibi")


def with_unit_head(model: Any) -> None:
    model.lm_head.weight.copy_(functional.normalize(model.lm_head.weight))


def both(model: Any) -> None:
    without_rotation(model)
    with_unit_head(model)


def baichuan(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The 7B model of Baichuan 1."""
    kept = ("hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads")
    kept += ("num_hidden_layers", "rms_norm_eps", "tie_word_embeddings", "vocab_size")
    for key in set(config) - set(kept):
        del config[key]
    config["architectures"], config["model_type"] = ["BaiChuanForCausalLM"], "baichuan"
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}.self_attn."
        tensors[f"{layer}W_pack.weight"] = np.concatenate([tensors.pop(f"{layer}{x}_proj.weight") for x in "qkv"])


def baichuan_13b(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    baichuan(config, tensors)
    config["architectures"] = ["BaichuanForCausalLM"]
    config["model_max_length"] = config.pop("max_position_embeddings")


def second(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Baichuan 2: the head's rows have other lengths in the file."""
    config["z_loss_weight"] = 0
    lengths = np.random.default_rng(0).uniform(0.5, 2, (config["vocab_size"], 1)).astype(np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * lengths


def baichuan2(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    baichuan(config, tensors)
    second(config, tensors)
    config["architectures"], config["model_max_length"] = ["BaichuanForCausalLM"], config["max_position_embeddings"]


def baichuan2_13b(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    baichuan_13b(config, tensors)
    second(config, tensors)


MHA = {"num_key_value_heads": 4}
SIX_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96}

VARIANTS = {
    "baichuan": Variant("Llama", MHA, rewrite=baichuan),
    "baichuan2": Variant("Llama", MHA, rewrite=baichuan2, adjust=with_unit_head),
    "baichuan-13b": Variant("Llama", SIX_HEADS, rewrite=baichuan_13b, adjust=without_rotation),
    "baichuan2-13b": Variant("Llama", MHA, rewrite=baichuan2_13b, adjust=both),
}
