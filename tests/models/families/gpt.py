"""GPT-2 and those that follow it: GPT-BigCode, GPT-J, GPT-NeoX."""

from typing import Any

from tests.models.variant import Variant


def without_prefix(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The first checkpoints' names, and masks that go unused."""
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)
    tensors["h.0.attn.bias"] = tensors["wte.weight"][:1]


def pythia(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The words of Pythia's files, and buffers that go unused."""
    rope = config.pop("rope_parameters")
    config["rotary_pct"], config["rotary_emb_base"] = rope["partial_rotary_factor"], rope["rope_theta"]
    for key in ("attention_bias", "layer_norm_eps"):
        del config[key]
    for buffer in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        tensors[f"gpt_neox.layers.0.attention.{buffer}"] = tensors["gpt_neox.embed_in.weight"][:1]


SMALL = {
    "vocab_size": 199,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

VARIANTS = {
    "gpt2": Variant("GPT2", SMALL, model="GPT2LMHeadModel", common=False),
    "gpt2-scales": Variant(
        "GPT2",
        SMALL
        | {
            "scale_attn_by_inverse_layer_idx": True,
            "reorder_and_upcast_attn": True,
            "n_inner": 96,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
        model="GPT2LMHeadModel",
        common=False,
    ),
    "gpt2-unscaled": Variant(
        "GPT2",
        SMALL | {"scale_attn_weights": False, "initializer_range": 0.15},
        model="GPT2LMHeadModel",
        common=False,
        rewrite=without_prefix,
    ),
    "gpt-bigcode": Variant("GPTBigCode", SMALL, common=False),
    "gpt-bigcode-mha": Variant(
        "GPTBigCode",
        SMALL | {"multi_query": False, "n_inner": 96, "activation_function": "gelu", "tie_word_embeddings": False},
        common=False,
    ),
    "gptj": Variant("GPTJ", SMALL | {"rotary_dim": 8}, common=False),
    "gptj-all-rotated": Variant("GPTJ", SMALL | {"rotary_dim": 16, "n_inner": 96}, common=False),
    "gpt-neox": Variant("GPTNeoX"),
    "gpt-neox-sequential": Variant(
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "hidden_act": "gelu_fast",
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 1.0},
        },
    ),
    "pythia": Variant("GPTNeoX", rewrite=pythia),
}
