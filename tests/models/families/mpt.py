"""MPT.

transformers builds it with ALiBi and without biases only; with learned positions and biases it computes what GPT-2
does, whose tensors are then written in MPT's layout.
"""

from typing import Any

from tests.models.families.gpt import SMALL as GPT2
from tests.models.variant import Variant

NAMES = {
    "ln_1": "norm_1",
    "attn.c_attn": "attn.Wqkv",
    "attn.c_proj": "attn.out_proj",
    "ln_2": "norm_2",
    "mlp.c_fc": "ffn.up_proj",
    "mlp.c_proj": "ffn.down_proj",
}


def from_gpt2(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    for name in list(tensors):
        value = tensors.pop(name)
        new = name.replace("transformer.h.", "transformer.blocks.").replace("ln_f", "norm_f")
        for theirs, ours in NAMES.items():
            new = new.replace(f".{theirs}.", f".{ours}.")
        tensors[new] = value.T if value.ndim == 2 and ".blocks." in new else value
    sizes = {key: config[key] for key in ("vocab_size", "n_embd", "n_layer", "n_head", "n_positions")}
    config.clear()
    config.update(
        architectures=["MPTForCausalLM"],
        vocab_size=sizes["vocab_size"],
        d_model=sizes["n_embd"],
        n_layers=sizes["n_layer"],
        n_heads=sizes["n_head"],
        max_seq_len=sizes["n_positions"],
        expansion_ratio=2,
        learned_pos_emb=True,
        no_bias=False,
        norm_type="low_precision_layernorm",
        attn_config={"attn_type": "multihead_attention", "alibi": False, "attn_impl": "triton"},
    )


SMALL = {
    "vocab_size": 199,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

VARIANTS = {
    "mpt": Variant("Mpt", SMALL, common=False),
    "mpt-clip": Variant(
        "Mpt",
        SMALL
        | {
            "d_model": 96,
            "n_heads": 6,
            "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.3},
            "tie_word_embeddings": False,
        },
        common=False,
    ),
    "mpt-positions": Variant(
        "GPT2",
        GPT2 | {"activation_function": "gelu", "n_inner": 128},
        model="GPT2LMHeadModel",
        common=False,
        rewrite=from_gpt2,
    ),
}
