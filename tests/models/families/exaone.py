"""EXAONE 3. transformers runs it as a Llama, but saves it with the names of the released files."""

from typing import Any

from tests.models.variant import Variant

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def release(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The keys of the released files."""
    config["architectures"] = ["ExaoneForCausalLM"]
    config["num_layers"] = config.pop("num_hidden_layers")
    config["layer_norm_epsilon"] = config.pop("rms_norm_eps")
    config["activation_function"] = config.pop("hidden_act")
    config["rope_scaling"] = config.pop("rope_parameters")
    config["rope_theta"] = config["rope_scaling"].pop("rope_theta")


def current(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    """The keys that transformers writes."""
    config["architectures"] = ["ExaoneForCausalLM"]


VARIANTS = {
    "exaone": Variant("Exaone", {"rope_parameters": LLAMA3_ROPE}, model="LlamaForCausalLM", rewrite=release),
    "exaone-tied-bias": Variant(
        "Exaone",
        {"tie_word_embeddings": True, "head_dim": 32, "attention_bias": True, "mlp_bias": True},
        model="LlamaForCausalLM",
        rewrite=current,
    ),
}
