"""What each general.architecture of GGUF files is in the words of Hugging Face's config.json and names of tensors.

Facts from llama.cpp's converter (https://github.com/ggml-org/llama.cpp, conversion/) and its `gguf` package. Where a
family is another one under names of its own (InternLM 2 and EXAONE 3 are Llamas), its files have lost these names, and
the table says what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.gguf_metadata import Metadata
from octavo.checkpoint.gguf_names import LLAMA, SANDWICH, Names

Config = dict[str, Any]

BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"}


class Family(NamedTuple):
    """How to read the files of one architecture."""

    name: str
    """Of the architecture in config.json."""
    model_type: str
    names: Names = LLAMA
    paired: bool = False
    """The rows of q and k lie so that rotary pairs are neighbours, against the Hugging Face layout."""
    eps: str = "attention.layer_norm_rms_epsilon"
    words: Mapping[str, str] = {}
    """Metadata that config.json has under another name; what is absent or 0 is left out."""
    switches: Mapping[str, str] = BIASES
    """Key of config.json -> the tensor of layer 0 whose presence it says."""
    constants: Mapping[str, Any] = {}
    """What the files do not say."""
    more: Callable[[Metadata, Config], Config] | None = None
    """(metadata, config so far) -> what else config.json says."""


def _layer_types(meta: Metadata, config: Config, period: int) -> list[str]:
    """Which layers slide: as the file says, layer by layer or by period; without a word the last of each `period`
    layers does not."""
    layers: int = config["num_hidden_layers"]
    slides = meta.per_layer("attention.sliding_window_pattern", layers)
    if slides is None:
        period = meta.integer("attention.sliding_window_pattern", period)
        slides = [bool(period) and (i + 1) % period != 0 for i in range(layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _llama(meta: Metadata, config: Config) -> Config:
    """Files of InternLM 3 say they are llama, and may have a bias on q, k and v only: what config.json does not say
    follows from the tensors."""
    same = meta.has("attn_q.bias") == meta.has("attn_output.bias")
    return {} if same else {"attention_bias": None}


_GEMMA3_LOCAL_BASE = 10000.0
_GEMMA3_27B_LAYERS = 62
"""The one size whose softmax scale comes from hidden_size / heads instead of head_dim; files do not say so."""


def _gemma3(meta: Metadata, config: Config) -> Config:
    largest = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": meta.number("rope.freq_base", 1000000.0),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE),
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": _layer_types(meta, config, 6),
    }


def _minicpm(meta: Metadata, config: Config) -> Config:
    """Files without multipliers are of the first release, whose config.json llama.cpp's loader knows by heart."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    logits = meta.number("logit_scale", hidden / 256)
    if logits <= 0:
        raise CheckpointError(f"{meta.path}: the metadata 'minicpm.logit_scale' is {logits}. Convert the model again.")
    return {
        "scale_emb": meta.number("embedding_scale", 12.0),
        "scale_depth": meta.number("residual_scale", 1.4 / layers**0.5) * layers**0.5,
        "dim_model_base": hidden / logits,
    }


_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", paired=True, more=_llama),
    "arcee": Family("ArceeForCausalLM", "arcee", paired=True, constants={"hidden_act": "relu2"}),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", switches={"use_bias": "attn_q.bias"}),
    "exaone": Family("LlamaForCausalLM", "llama"),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", SANDWICH, more=_gemma3),
    "granite": Family("GraniteForCausalLM", "granite", paired=True, words=_GRANITE),
    "hunyuan-dense": Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        LLAMA.but(attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm"),
        switches={**BIASES, "use_qk_norm": "attn_q_norm.weight"},
    ),
    "internlm2": Family("LlamaForCausalLM", "llama", paired=True),
    "minicpm": Family("MiniCPMForCausalLM", "minicpm", paired=True, more=_minicpm),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        "seed_oss",
        LLAMA.but(post_attention_norm="post_attention_layernorm"),
        switches={**BIASES, "attention_out_bias": "attn_output.bias"},
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", paired=True),
}
"""general.architecture -> family."""
