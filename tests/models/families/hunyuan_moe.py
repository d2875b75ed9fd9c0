"""Hunyuan with mixtures of experts."""

from typing import Any

from tests.models.families.hunyuan import ALPHA, release
from tests.models.variant import Variant

SMALL = {"num_experts": 6, "moe_topk": 3, "intermediate_size": 32, "head_dim": 16}


def published(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Hunyuan-A13B's own words: some sizes are lists with an entry per layer."""
    release(config, tensors)
    layers = config["num_hidden_layers"]
    config["moe_topk"] = [config["moe_topk"]] * layers
    config["moe_intermediate_size"] = [config["intermediate_size"]] * layers
    config["num_shared_expert"] = [1] * layers
    config["attention_head_dim"] = config.pop("head_dim")
    config.update(use_mixed_mlp_moe=True, use_qk_norm=True, use_cla=False, cla_share_factor=2)


VARIANTS = {
    "hunyuan-moe": Variant("HunYuanMoEV1", {**SMALL, "head_dim": 32, "tie_word_embeddings": True}),
    "hunyuan-moe-layers": Variant(
        "HunYuanMoEV1", {**SMALL, "moe_topk": [1, 2, 3], "attention_bias": True, "num_key_value_heads": 4}
    ),
    "hunyuan-moe-published": Variant("HunYuanMoEV1", {**SMALL, "rope_parameters": ALPHA}, rewrite=published),
}
