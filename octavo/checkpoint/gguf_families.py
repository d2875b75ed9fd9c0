"""What each general.architecture of GGUF files is in the words of Hugging Face's config.json and names of tensors.

Facts from llama.cpp's converter (https://github.com/ggml-org/llama.cpp, conversion/) and its `gguf` package. Where a
family is another one under names of its own (InternLM 2 and EXAONE 3 are Llamas), its files have lost these names, and
the table says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.gguf_metadata import Metadata
from octavo.checkpoint.gguf_names import (
    BEHIND,
    BLOOM,
    EXPERTS,
    FUSED,
    GEMMA3N,
    GPT2,
    GPT_NEOX,
    LATENT,
    LLAMA,
    MPT,
    PHI,
    SANDWICH,
    Names,
)

Config = dict[str, Any]

BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_down.bias"}

_LAYER_NORM = "attention.layer_norm_epsilon"


class Family(NamedTuple):
    """How to read the files of one architecture."""

    name: str
    """Of the architecture in config.json."""
    model_type: str
    names: Names = LLAMA
    names_of: Callable[[Metadata], Names] | None = None
    """In place of `names`, where these differ from file to file."""
    paired: bool = False
    """The rows of q and k lie so that rotary pairs are neighbours, against the Hugging Face layout."""
    eps: str = "attention.layer_norm_rms_epsilon"
    words: Mapping[str, str] = {}
    """Metadata that config.json has under another name; what is absent, or a multiplier of 0, is left out."""
    switches: Mapping[str, str] = BIASES
    """Key of config.json -> the tensor of layer 0 whose presence it says."""
    constants: Mapping[str, Any] = {}
    """What the files do not say."""
    stacks: tuple[str, ...] = ()
    """Stacks of matrices that are tensors of their own elsewhere, with the number before the ending of the name."""
    latent: bool = False
    """The KV cache holds latent vectors: sizes of keys and values are not those of heads."""
    vectors: Mapping[str, tuple[str, tuple[int, ...]]] = {}
    """Metadata with a number per layer that is a tensor of each layer elsewhere -> (its name, its shape)."""
    more: Callable[[Metadata, Config], Config] | None = None
    """(metadata, config so far) -> what else config.json says."""


def _layer_types(meta: Metadata, period: int) -> list[str]:
    """Which layers slide: as the file says, layer by layer or by period; without a word the last of each `period`
    layers does not."""
    slides = meta.per_layer(f"{meta.architecture}.attention.sliding_window_pattern")
    if slides is None:
        period = meta.integer("attention.sliding_window_pattern", period)
        slides = [bool(period) and (i + 1) % period != 0 for i in range(meta.layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _llama(meta: Metadata, config: Config) -> Config:
    """Mixtral's files say they are llama. So do InternLM 3's, which may have a bias on q, k and v only: what
    config.json does not say follows from the tensors."""
    if "num_experts" in config:
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    same = meta.has("attn_q.bias") == meta.has("attn_output.bias")
    return {} if same else {"attention_bias": None}


def _plain_rope(config: Config) -> Config:
    """Says that RoPE is not scaled to families that otherwise take it to be."""
    if config["rope_scaling"] is not None:
        return {}
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}


_BAICHUAN_13B_LAYERS = 40
"""The size with ALiBi instead of RoPE, in both releases; files do not say so."""


def _baichuan(meta: Metadata, config: Config) -> Config:
    if meta.layers != _BAICHUAN_13B_LAYERS:
        return {}
    return {"max_position_embeddings": None, "model_max_length": config["max_position_embeddings"]}


def _mistral3(meta: Metadata, config: Config) -> Config:
    beta = meta.number("attention.temperature_scale", 0.0)
    if not beta or config["rope_scaling"] is None:
        return _plain_rope(config)
    return {"rope_scaling": {**config["rope_scaling"], "llama_4_scaling_beta": beta}}


def _olmo2(meta: Metadata, config: Config) -> Config:
    """OLMo 3's files say they are olmo2."""
    if not config.get("sliding_window"):
        return {}
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "layer_types": _layer_types(meta, 4),
    }


_EXAONE4_32B_LAYERS = 64
"""The released size with windows; its first files do not say so."""


def _exaone4(meta: Metadata, config: Config) -> Config:
    window = meta.integer("attention.sliding_window", 4096 if meta.layers == _EXAONE4_32B_LAYERS else 0)
    return {"sliding_window": window or None, "layer_types": _layer_types(meta, 4 if window else 0)}


def _some_layers(meta: Metadata, config: Config) -> Config:
    """Which layers of a Qwen have no experts."""
    return {
        "mlp_only_layers": sorted(set(range(meta.layers)) - set(meta.layers_with("ffn_gate_inp.weight"))),
        "shared_expert_intermediate_size": meta.width("ffn_down_shexp.weight"),
    }


def _granite_moe(meta: Metadata, config: Config) -> Config:
    shared = meta.width("ffn_down_shexp.weight")
    return {"architectures": ["GraniteMoeSharedForCausalLM"], "shared_intermediate_size": shared} if shared else {}


def _shared_experts(meta: Metadata, config: Config) -> int:
    """How many of a layer's experts every token passes; in files these are one of their width together."""
    width, each = meta.width("ffn_down_shexp.weight"), config.get("moe_intermediate_size", 0)
    if not width:
        return 0
    if not each or width % each:
        raise CheckpointError(
            f"{meta.path}: the shared experts are {width} wide, no multiple of the {each} of the others. Convert the "
            f"model again."
        )
    return int(width // each)


def _ernie_moe(meta: Metadata, config: Config) -> Config:
    layers = meta.layers_with("ffn_gate_inp.weight") or [0]
    return {
        "moe_layer_start_index": layers[0],
        "moe_layer_end_index": layers[-1],
        "moe_num_shared_experts": _shared_experts(meta, config),
    }


def _glm4_moe(meta: Metadata, config: Config) -> Config:
    return {"n_shared_experts": _shared_experts(meta, config)}


def _hunyuan_moe(meta: Metadata, config: Config) -> Config:
    width = meta.width("ffn_down_shexp.weight")
    return {"num_shared_expert": width // config["intermediate_size"]}


def _phimoe(meta: Metadata, config: Config) -> Config:
    out: Config = {"lm_head_bias": "output.bias" in meta.shapes}
    scaling = config["rope_scaling"]
    if scaling is not None:
        scale = scaling.get("attention_factor", 1.0)
        out["rope_scaling"] = {**scaling, "short_mscale": scale, "long_mscale": scale}
    return out


_GEMMA3_LOCAL_BASE = 10000.0
_GEMMA3_27B_LAYERS = 62
"""The one size whose softmax scale comes from hidden_size / heads instead of head_dim; files do not say so."""


def _gemma3(meta: Metadata, config: Config) -> Config:
    largest = meta.layers == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": meta.number("rope.freq_base", 1000000.0),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE),
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": _layer_types(meta, 6),
    }


_MAVERICK_EXPERTS = 128
"""The number by which files of Llama 4's model without norms of q and k are known."""


def _llama4(meta: Metadata, config: Config) -> Config:
    """Files say nothing of chunks, layers without positions and temperatures, which are always those of the release;
    but a window of 0 says that there are none."""
    out: Config = {
        "intermediate_size": config.get("moe_intermediate_size") or config["intermediate_size"],
        "intermediate_size_mlp": meta.integer("feed_forward_length"),
        "moe_layers": meta.layers_with("ffn_gate_inp.weight"),
        "use_qk_norm": config.get("num_experts") != _MAVERICK_EXPERTS,
    }
    if meta.own("attention.sliding_window") == 0:
        out |= {"attention_chunk_size": None, "no_rope_layers": [1] * meta.layers, "attn_temperature_tuning": False}
    return out


def _minicpm(meta: Metadata, config: Config) -> Config:
    """Files without multipliers are of the first release, whose config.json llama.cpp's loader knows by heart."""
    layers, hidden = meta.layers, config["hidden_size"]
    logits = meta.number("logit_scale", hidden / 256)
    if logits <= 0:
        raise CheckpointError(f"{meta.path}: the metadata 'minicpm.logit_scale' is {logits}. Convert the model again.")
    return {
        "scale_emb": meta.number("embedding_scale", 12.0),
        "scale_depth": meta.number("residual_scale", 1.4 / layers**0.5) * layers**0.5,
        "dim_model_base": hidden / logits,
    }


_GEMMA2_27B_LAYERS = 46
"""As for Gemma 3, its 27B model is the one whose softmax scale comes from hidden_size / heads."""


def _gemma2(meta: Metadata, config: Config) -> Config:
    largest = meta.layers == _GEMMA2_27B_LAYERS
    return {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if largest
        else config["head_dim"],
        "layer_types": _layer_types(meta, 2),
    }


def _gemma3n(meta: Metadata, config: Config) -> Config:
    """What files say of sparsity is how many standard deviations above the mean the rest lies."""
    scales = meta.per_layer(f"{meta.architecture}.activation_sparsity_scale") or [-math.inf] * meta.layers
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": [meta.shapes.get(f"blk.{i}.ffn_down.weight", (0,))[-1] for i in range(meta.layers)],
        "rope_theta": meta.number("rope.freq_base", 1000000.0),
        "rope_local_base_freq": meta.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE),
        "sliding_window": meta.integer("attention.sliding_window"),
        "layer_types": _layer_types(meta, 5),
        "activation_sparsity_pattern": [NormalDist().cdf(scale) for scale in scales],
        "hidden_size_per_layer_input": meta.integer("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": meta.shapes.get("per_layer_token_embd.weight", (0,))[0],
        "altup_num_inputs": meta.integer("altup.num_inputs"),
        "altup_active_idx": meta.integer("altup.active_idx"),
        "altup_correct_scale": meta.has("altup_correct_scale.weight"),
        "num_kv_shared_layers": meta.integer("attention.shared_kv_layers"),
        "laurel_rank": meta.width("laurel_r.weight"),
    }


def _cohere2(meta: Metadata, config: Config) -> Config:
    return {"layer_types": _layer_types(meta, 4)}


def _glm(meta: Metadata, config: Config) -> Config:
    return {"attention_bias": meta.has("attn_q.bias") or meta.has("attn_qkv.bias")}


def _stablelm(meta: Metadata, config: Config) -> Config:
    return {"use_parallel_residual": not meta.has("ffn_norm.weight")}


def _falcon(meta: Metadata, config: Config) -> Config:
    two = meta.has("attn_norm_2.weight")
    if not two and config["num_key_value_heads"] == 1:
        return {}
    return {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 2 if two else 1}


def _falcon_names(meta: Metadata) -> Names:
    """Of two norms, the one that files call the second is that of attention."""
    return BLOOM.but(attn_norm="ln_mlp", attn_norm_2="ln_attn") if meta.has("attn_norm_2.weight") else BLOOM


def _mpt(meta: Metadata, config: Config) -> Config:
    bias = meta.number("attention.max_alibi_bias", 0.0)
    clip = meta.number("attention.clamp_kqv", 0.0)
    return {
        "no_bias": not meta.has("attn_qkv.bias"),
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
        "attn_config": {"alibi": bias > 0, "alibi_bias_max": bias or None, "clip_qkv": clip or None},
    }


def _gpt_oss(meta: Metadata, config: Config) -> Config:
    """Its YaRN does not round where the ramp begins and ends, which files do not say."""
    scaling = config["rope_scaling"]
    return {
        "layer_types": _layer_types(meta, 2),
        "rope_scaling": None if scaling is None else {**scaling, "truncate": False},
    }


_SIGMOID = 2
"""Of expert_gating_func."""


def _deepseek2(meta: Metadata, config: Config) -> Config:
    rotated = config["head_dim"]
    sigmoid = meta.integer("expert_gating_func", 1) == _SIGMOID or bool(meta.layers_with("exp_probs_b.bias"))
    groups = config.get("n_group", 1) > 1
    scaling = config["rope_scaling"]
    if scaling is not None and "mscale_all_dim" in scaling:  # a tenth of it in these files, and the other is the same
        scale = 10 * scaling["mscale_all_dim"]
        scaling = {**scaling, "mscale": scale, "mscale_all_dim": scale}
    out: Config = {
        "architectures": ["DeepseekV3ForCausalLM" if sigmoid else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if sigmoid else "deepseek_v2",
        "rope_scaling": scaling,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": meta.integer("attention.key_length_mla", meta.integer("attention.key_length", 0)) - rotated,
        "v_head_dim": meta.integer("attention.value_length_mla", meta.integer("attention.value_length", 0)),
        "kv_lora_rank": meta.integer("attention.kv_lora_rank"),
        "q_lora_rank": meta.integer("attention.q_lora_rank", 0) or None,
        "scoring_func": "sigmoid" if sigmoid else "softmax",
        "topk_method": "noaux_tc" if sigmoid else "group_limited_greedy" if groups else "greedy",
        "attention_bias": meta.has("attn_kv_a_mqa.bias"),
    }
    if "num_experts" in config:
        out["n_shared_experts"] = _shared_experts(meta, config)
    return out


_GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}

FAMILIES: dict[str, Family] = {
    "apertus": Family(
        "ApertusForCausalLM",
        "apertus",
        LLAMA.but(attn_norm="attention_layernorm", ffn_norm="feedforward_layernorm"),
        constants={"hidden_act": "xielu"},
        vectors={
            "xielu.alpha_p": ("mlp.act_fn.alpha_p", (1,)),
            "xielu.alpha_n": ("mlp.act_fn.alpha_n", (1,)),
            "xielu.beta": ("mlp.act_fn.beta", ()),
            "xielu.eps": ("mlp.act_fn.eps", ()),
        },
        more=lambda meta, config: _plain_rope(config),
    ),
    "arcee": Family("ArceeForCausalLM", "arcee", paired=True, constants={"hidden_act": "relu2"}),
    "baichuan": Family("BaichuanForCausalLM", "baichuan", paired=True, more=_baichuan),
    "bloom": Family("BloomForCausalLM", "bloom", BLOOM, eps=_LAYER_NORM, constants={"hidden_act": "gelu_new"}),
    "chatglm": Family("GlmForCausalLM", "glm", FUSED, more=_glm),
    "cohere2": Family(
        "Cohere2ForCausalLM", "cohere2", eps=_LAYER_NORM, words={"logit_scale": "logit_scale"}, more=_cohere2
    ),
    "command-r": Family(
        "CohereForCausalLM",
        "cohere",
        eps=_LAYER_NORM,
        words={"logit_scale": "logit_scale"},
        switches={**BIASES, "use_qk_norm": "attn_q_norm.weight"},
    ),
    "deepseek2": Family("DeepseekV3ForCausalLM", "deepseek_v3", LATENT, latent=True, more=_deepseek2),
    "ernie4_5": Family("Ernie4_5ForCausalLM", "ernie4_5", switches={"use_bias": "attn_q.bias"}),
    "ernie4_5-moe": Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        EXPERTS.but(**{"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}),
        words={"expert_used_count": "moe_k", "interleave_moe_layer_step": "moe_layer_interval"},
        switches={"use_bias": "attn_q.bias"},
        more=_ernie_moe,
    ),
    "exaone": Family("LlamaForCausalLM", "llama"),
    "exaone4": Family("Exaone4ForCausalLM", "exaone4", BEHIND, more=_exaone4),
    "falcon": Family(
        "FalconForCausalLM",
        "falcon",
        names_of=_falcon_names,
        eps=_LAYER_NORM,
        switches={"bias": "attn_qkv.bias"},
        constants={"activation": "gelu"},
        more=_falcon,
    ),
    "gemma": Family("GemmaForCausalLM", "gemma", constants={"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        SANDWICH,
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        more=_gemma2,
    ),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", SANDWICH, more=_gemma3),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        GEMMA3N,
        switches={"attention_bias": "attn_q.bias"},
        stacks=("altup_proj.weight", "altup_unembd_proj.weight"),
        more=_gemma3n,
    ),
    "glm4": Family(
        "Glm4ForCausalLM",
        "glm4",
        FUSED.but(post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"),
        more=_glm,
    ),
    "glm4moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        EXPERTS.but(post_attention_norm="post_attention_layernorm"),
        switches={**BIASES, "use_qk_norm": "attn_q_norm.weight"},
        more=_glm4_moe,
    ),
    "gpt-oss": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        EXPERTS.but(
            **{
                "attn_sinks.weight": "self_attn.sinks",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.router",
            }
        ),
        more=_gpt_oss,
    ),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", GPT2, eps=_LAYER_NORM, constants={"hidden_act": "gelu_new"}),
    "gptneox": Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        GPT_NEOX,
        eps=_LAYER_NORM,
        words={"use_parallel_residual": "use_parallel_residual"},
        switches={"attention_bias": "attn_qkv.bias"},
        constants={"hidden_act": "gelu"},
    ),
    "granite": Family("GraniteForCausalLM", "granite", paired=True, words=_GRANITE),
    "granitemoe": Family(
        "GraniteMoeForCausalLM", "granitemoe", EXPERTS, paired=True, words=_GRANITE, more=_granite_moe
    ),
    "hunyuan-dense": Family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        LLAMA.but(attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm"),
        switches={**BIASES, "use_qk_norm": "attn_q_norm.weight"},
    ),
    "hunyuan-moe": Family(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        EXPERTS.but(
            attn_q_norm="self_attn.query_layernorm",
            attn_k_norm="self_attn.key_layernorm",
            ffn_gate_shexp="mlp.shared_mlp.gate_proj",
            ffn_up_shexp="mlp.shared_mlp.up_proj",
            ffn_down_shexp="mlp.shared_mlp.down_proj",
        ),
        words={"expert_used_count": "moe_topk"},
        switches={**BIASES, "use_qk_norm": "attn_q_norm.weight"},
        more=_hunyuan_moe,
    ),
    "internlm2": Family("LlamaForCausalLM", "llama", paired=True),
    "llama": Family("LlamaForCausalLM", "llama", EXPERTS, paired=True, more=_llama),
    "llama4": Family(
        "Llama4ForCausalLM",
        "llama4_text",
        LLAMA.but(
            ffn_gate="feed_forward.gate_proj",
            ffn_up="feed_forward.up_proj",
            ffn_down="feed_forward.down_proj",
            ffn_gate_inp="feed_forward.router",
            ffn_gate_exps="feed_forward.experts.gate_proj",
            ffn_up_exps="feed_forward.experts.up_proj",
            ffn_down_exps="feed_forward.experts.down_proj",
            ffn_gate_shexp="feed_forward.shared_expert.gate_proj",
            ffn_up_shexp="feed_forward.shared_expert.up_proj",
            ffn_down_shexp="feed_forward.shared_expert.down_proj",
        ),
        more=_llama4,
    ),
    "minicpm": Family("MiniCPMForCausalLM", "minicpm", paired=True, more=_minicpm),
    "mistral3": Family("Ministral3ForCausalLM", "ministral3", paired=True, more=_mistral3),
    "mpt": Family("MPTForCausalLM", "mpt", MPT, eps=_LAYER_NORM, constants={"hidden_act": "gelu"}, more=_mpt),
    "nemotron": Family("NemotronForCausalLM", "nemotron", eps=_LAYER_NORM, constants={"hidden_act": "relu2"}),
    "olmo": Family("OlmoForCausalLM", "olmo", paired=True, eps=_LAYER_NORM, words={"attention.clamp_kqv": "clip_qkv"}),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", BEHIND, more=_olmo2),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", EXPERTS, constants={"norm_topk_prob": False}),
    "phi2": Family("PhiForCausalLM", "phi", PHI, eps=_LAYER_NORM, constants={"hidden_act": "gelu_new"}),
    "phi3": Family("Phi3ForCausalLM", "phi3", FUSED),
    "phimoe": Family("PhimoeForCausalLM", "phimoe", EXPERTS, more=_phimoe),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        EXPERTS.but(
            ffn_gate_shexp="mlp.shared_expert.gate_proj",
            ffn_up_shexp="mlp.shared_expert.up_proj",
            ffn_down_shexp="mlp.shared_expert.down_proj",
            ffn_gate_inp_shexp="mlp.shared_expert_gate",
        ),
        switches={"qkv_bias": "attn_q.bias"},
        constants={"norm_topk_prob": False},
        more=_some_layers,
    ),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Family(
        "Qwen3MoeForCausalLM", "qwen3_moe", EXPERTS, constants={"norm_topk_prob": True}, more=_some_layers
    ),
    "seed_oss": Family(
        "SeedOssForCausalLM",
        "seed_oss",
        LLAMA.but(post_attention_norm="post_attention_layernorm"),
        switches={**BIASES, "attention_out_bias": "attn_output.bias"},
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "smollm3", paired=True),
    "stablelm": Family(
        "StableLmForCausalLM",
        "stablelm",
        LLAMA.but(attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm"),
        eps=_LAYER_NORM,
        switches={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        more=_stablelm,
    ),
    "starcoder": Family(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        GPT2,
        eps=_LAYER_NORM,
        constants={"hidden_act": "gelu_pytorch_tanh"},
        more=lambda meta, config: {"multi_query": config["num_key_value_heads"] == 1},
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        LLAMA.but(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"),
        eps=_LAYER_NORM,
        switches={"use_bias": "attn_q.bias"},
        constants={"hidden_act": "gelu_pytorch_tanh"},
    ),
}
"""general.architecture -> family."""
