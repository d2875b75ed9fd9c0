"""What a config asks for and no model is built for is refused with its key; tables of positions bound the context."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from octavo.models.config import ACTIVATIONS, ModelConfigError
from octavo.models.decoder import Decoder
from octavo.models.registry import find

SIZES = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def build(name: str, **keys: Any) -> Decoder:
    raw = {**SIZES, **keys, "architectures": [name]}
    architecture = find(raw)
    return architecture.make(architecture.config(raw), 64)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm"),
    ("PhiForCausalLM", {"tie_word_embeddings": True}, "tie_word_embeddings"),
    ("GPTJForCausalLM", {"tie_word_embeddings": True, "rotary_dim": 16}, "tie_word_embeddings"),
    ("GPTJForCausalLM", {"rotary_dim": None}, "rotary_dim = None"),
    ("GPTJForCausalLM", {"rotary_dim": 18}, "rotary_dim = 18"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
    ("GPTBigCodeForCausalLM", {"add_cross_attention": True}, "add_cross_attention"),
    ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
    ("FalconForCausalLM", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection"),
    ("FalconForCausalLM", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
    ("MPTForCausalLM", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = 'inv_sqrt_d_model'"),
    ("MPTForCausalLM", {"norm_type": "rmsnorm"}, "norm_type = 'rmsnorm'"),
    ("MPTForCausalLM", {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln = True"),
    ("MPTForCausalLM", {"attn_config": {"rope": True}}, "attn_config.rope = True"),
    ("MPTForCausalLM", {"attn_config": {"attn_type": "grouped_query_attention"}}, "grouped_query_attention"),
    ("MPTForCausalLM", {"ffn_config": {"ffn_type": "mptglu"}}, "ffn_type = 'mptglu'"),
    ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3"),
    ("PhimoeForCausalLM", {"tie_word_embeddings": True, "lm_head_bias": True}, "lm_head_bias"),
    ("PhimoeForCausalLM", {"rope_scaling": {"type": "longrope"}}, "short_mscale = None"),
    ("PhimoeForCausalLM", {"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn'"),
    ("HunYuanMoEV1ForCausalLM", {"use_cla": True}, "use_cla"),
    ("HunYuanMoEV1ForCausalLM", {"use_mla": True}, "use_mla"),
    ("HunYuanMoEV1ForCausalLM", {"group_limited_greedy": True}, "group_limited_greedy"),
    ("HunYuanMoEV1ForCausalLM", {"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe"),
    ("HunYuanMoEV1ForCausalLM", {"moe_topk": [2]}, "moe_topk = .2.: 2 numbers are needed"),
    ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias"),
    ("ApertusForCausalLM", {"post_norm": True}, "post_norm = True"),
    ("ApertusForCausalLM", {"qk_norm": False}, "qk_norm = False"),
    ("ApertusForCausalLM", {"mlp_bias": True}, "mlp_bias = True"),
    ("BaichuanForCausalLM", {"tie_word_embeddings": True, "z_loss_weight": 0}, "tie_word_embeddings"),
    ("Ernie4_5_ForCausalLM", {"compression_ratio": 2.0}, "compression_ratio = 2.0"),
    ("Ernie4_5_ForCausalLM", {"use_bias": True, "weight_share_add_bias": True}, "weight_share_add_bias"),
    ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla"),
    ("HunYuanDenseV1ForCausalLM", {"num_experts": 4}, "num_experts = 4"),
    ("MiniCPMForCausalLM", {"num_experts": 4}, "num_experts = 4"),
    ("MiniCPMForCausalLM", {"sparse_config": {"dense_len": 63}}, "dense_len = 63"),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "no_rope_layers lists 1"),
    ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "norm_topk_prob": True}, "norm_topk_prob"),
    ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "mlp_bias": True}, "mlp_bias"),
    ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method = 'greedy' with scoring_func = 'sigmoid'"),
    ("GptOssForCausalLM", {"swiglu_alpha": 2.0}, "swiglu_alpha = 2.0"),
    (
        "Llama4ForCausalLM",
        {"no_rope_layers": [1], "layer_types": ["chunked_attention"] * 2},
        "no_rope_layers lists 1 layers, num_hidden_layers says 2",
    ),
    ("Llama4ForCausalLM", {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, "sliding_attention"),
    (
        "Llama4ForCausalLM",
        {"layer_types": ["chunked_attention"] * 2, "attention_chunk_size": None},
        "attention_chunk_size is not set",
    ),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "activation_sparsity_pattern": 0.5}, "activation_sparsity"),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "intermediate_size": [96]}, "intermediate_size"),
    ("Gemma3nForCausalLM", {"num_kv_shared_layers": 2}, "leaves no sliding_attention layer"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED)
def test_what_is_not_built_is_refused_by_its_key(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        build(name, **keys)


@pytest.mark.parametrize(
    ("name", "keys", "rows"),
    [
        ("GPT2LMHeadModel", {"n_positions": 70}, 70),
        ("GPT2LMHeadModel", {}, 1024),
        ("GPTBigCodeForCausalLM", {"n_positions": 70}, 70),
        ("OPTForCausalLM", {"max_position_embeddings": 70}, 72),
        ("MPTForCausalLM", {"max_seq_len": 70, "attn_config": {"alibi": False}}, 70),
    ],
)
def test_the_context_ends_with_the_table_of_positions(name: str, keys: dict[str, Any], rows: int) -> None:
    """`resolve` refuses more than `max_position_embeddings`."""
    model = build(name, **keys)
    assert model.positions is not None
    assert model.positions.needs()[0].shape == (rows, 64)
    assert model.config.max_position_embeddings == rows - model.positions.offset


def test_layers_slide_by_turns_where_the_config_lists_no_kinds() -> None:
    layers = {"num_hidden_layers": 8, "sliding_window": 16}
    gemma = [b.attn.window for b in build("Gemma2ForCausalLM", **layers).blocks]
    assert gemma == [16, 0] * 4
    cohere = build("Cohere2ForCausalLM", **layers).blocks
    assert [b.attn.window for b in cohere] == [16, 16, 16, 0] * 2
    assert [b.attn.rope is None for b in cohere] == [False, False, False, True] * 2
    assert [b.attn.window for b in build("CohereForCausalLM", **layers).blocks] == [0] * 8


def test_the_last_layers_of_gemma_3n_read_the_last_of_their_kind() -> None:
    """Of 8 layers the fifth sees all; the last two are a sliding and a full one."""
    types = ["sliding_attention"] * 4 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"]
    blocks = build("Gemma3nForCausalLM", num_hidden_layers=8, num_kv_shared_layers=2, layer_types=types).blocks
    assert [(b.attn.shape.layer, b.attn.shape.stores) for b in blocks[5:]] == [(5, True), (5, False), (4, False)]
    default = build("Gemma3nForCausalLM", num_hidden_layers=20, num_kv_shared_layers=5).blocks
    assert [b.attn.window for b in default[:10]] == [512, 512, 512, 512, 0] * 2
    assert [hasattr(b.mlp, "deviations") for b in default] == [True] * 10 + [False] * 10


def test_gpt_oss_without_a_word_of_rope_has_that_of_its_class() -> None:
    theirs = transformers.GptOssConfig().rope_parameters
    rope = find({"architectures": ["GptOssForCausalLM"]}).config({**SIZES, "architectures": ["GptOssForCausalLM"]}).rope
    assert {key: rope[key] for key in theirs} == theirs


CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "GemmaForCausalLM": "GemmaConfig",
    "Gemma2ForCausalLM": "Gemma2Config",
    "PhiForCausalLM": "PhiConfig",
    "Phi3ForCausalLM": "Phi3Config",
    "GlmForCausalLM": "GlmConfig",
    "Glm4ForCausalLM": "Glm4Config",
    "Starcoder2ForCausalLM": "Starcoder2Config",
    "MixtralForCausalLM": "MixtralConfig",
    "PhimoeForCausalLM": "PhimoeConfig",
    "Qwen2MoeForCausalLM": "Qwen2MoeConfig",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "OlmoeForCausalLM": "OlmoeConfig",
    "GraniteMoeForCausalLM": "GraniteMoeConfig",
    "HunYuanMoEV1ForCausalLM": "HunYuanMoEV1Config",
    "Ernie4_5_MoeForCausalLM": "Ernie4_5_MoeConfig",
    "Glm4MoeForCausalLM": "Glm4MoeConfig",
    "CohereForCausalLM": "CohereConfig",
    "Cohere2ForCausalLM": "Cohere2Config",
    "StableLmForCausalLM": "StableLmConfig",
    "GPT2LMHeadModel": "GPT2Config",
    "GPTBigCodeForCausalLM": "GPTBigCodeConfig",
    "GPTJForCausalLM": "GPTJConfig",
    "GPTNeoXForCausalLM": "GPTNeoXConfig",
    "OPTForCausalLM": "OPTConfig",
    "FalconForCausalLM": "FalconConfig",
    "BloomForCausalLM": "BloomConfig",
    "MptForCausalLM": "MptConfig",
    "ApertusForCausalLM": "ApertusConfig",
    "ArceeForCausalLM": "ArceeConfig",
    "Ernie4_5ForCausalLM": "Ernie4_5Config",
    "Exaone4ForCausalLM": "Exaone4Config",
    "ExaoneForCausalLM": "ExaoneConfig",
    "GraniteForCausalLM": "GraniteConfig",
    "HunYuanDenseV1ForCausalLM": "HunYuanDenseV1Config",
    "InternLM3ForCausalLM": "InternLM3Config",
    "Ministral3ForCausalLM": "Ministral3Config",
    "MinistralForCausalLM": "MinistralConfig",
    "HeliumForCausalLM": "HeliumConfig",
    "NemotronForCausalLM": "NemotronConfig",
    "OlmoForCausalLM": "OlmoConfig",
    "Olmo2ForCausalLM": "Olmo2Config",
    "Olmo3ForCausalLM": "Olmo3Config",
    "SeedOssForCausalLM": "SeedOssConfig",
    "SmolLM3ForCausalLM": "SmolLM3Config",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "GptOssForCausalLM": "GptOssConfig",
    "Llama4ForCausalLM": "Llama4TextConfig",
}


@pytest.mark.parametrize("name", CLASSES)
def test_a_key_that_a_file_leaves_out_means_what_transformers_takes_it_for(name: str) -> None:
    """The classes' defaults, for what is not a size."""
    # GLM 4.5's class takes heads of 42 values by default, of which half cannot be turned in pairs.
    theirs = getattr(transformers, CLASSES[name])(**({"num_attention_heads": 32} if name.startswith("Glm4Moe") else {}))
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "ffn_dim")
    sizes += ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    raw = {key: getattr(theirs, key) for key in sizes if hasattr(theirs, key)} | {"architectures": [name]}
    architecture = find(raw)
    c = architecture.config(raw)

    def default(*keys: str) -> Any:
        return next((getattr(theirs, key) for key in keys if getattr(theirs, key, None) is not None), None)

    assert c.eps == (default("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon") or 1e-5)
    assert c.tie_word_embeddings == theirs.tie_word_embeddings
    assert c.max_position_embeddings == (default("max_position_embeddings", "max_seq_len") or 2048)
    fixed = {"BloomForCausalLM": "gelu_new", "MptForCausalLM": "gelu"}
    word = fixed.get(name) or default("hidden_activation", "hidden_act", "activation_function", "activation")
    assert c.activation == ACTIVATIONS[word]
    multi_query = name == "FalconForCausalLM"
    assert c.kv_heads == (1 if multi_query else default("num_key_value_heads") or c.heads)
    assert c.head_dim == (default("head_dim") or theirs.hidden_size // theirs.num_attention_heads)
    rope = default("rope_parameters")
    if rope is not None:
        if name == "Gemma3ForCausalLM":
            assert c.raw["rope_local_base_freq"] == rope["sliding_attention"]["rope_theta"]
        rope = rope.get("full_attention", rope)
        assert c.rope["rope_theta"] == rope["rope_theta"]
        assert c.rope.get("partial_rotary_factor", 1.0) == rope.get("partial_rotary_factor", 1.0)
    block = architecture.make(c, 64).blocks[0]
    assert block.attn.window == (default("sliding_window") or 0)


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("LlamaForCausalLM", {"num_key_value_heads": 3}, "not a multiple"),
    ("LlamaForCausalLM", {"num_key_value_heads": 0}, "num_key_value_heads = 0"),
    ("LlamaForCausalLM", {"hidden_size": 3}, "head_dim 0 is not supported"),
    ("LlamaForCausalLM", {"hidden_size": float("inf")}, "hidden_size = inf"),
    ("LlamaForCausalLM", {"hidden_size": float("nan")}, "hidden_size = nan"),
    ("LlamaForCausalLM", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, more than 10000"),
    ("LlamaForCausalLM", {"num_attention_heads": 10**9}, "num_attention_heads = 1000000000, more than"),
    ("LlamaForCausalLM", {"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    ("LlamaForCausalLM", {"rms_norm_eps": "tiny"}, "rms_norm_eps = 'tiny'"),
    ("LlamaForCausalLM", {"rms_norm_eps": -1e-5}, "rms_norm_eps = -1e-05"),
    ("LlamaForCausalLM", {"sliding_window": -4}, "sliding_window = -4"),
    ("LlamaForCausalLM", {"sliding_window": True}, "sliding_window = True"),
    ("LlamaForCausalLM", {"layer_types": 7}, "layer_types = 7, a list is needed"),
    ("LlamaForCausalLM", {"layer_types": ["full_attention"]}, "layer_types lists 1 layers"),
    ("LlamaForCausalLM", {"layer_types": [None, "mamba"]}, "layer_types holds None"),
    ("LlamaForCausalLM", {"rope_scaling": "linear"}, "rope_scaling = 'linear', an object is needed"),
    ("LlamaForCausalLM", {"rope_parameters": {"full_attention": 5}}, "full_attention = 5, an object is needed"),
    ("LlamaForCausalLM", {"rope_theta": True}, "rope_theta = True"),
    ("MixtralForCausalLM", {}, "no number of experts"),
    ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 5}, "4 experts .* pass 5"),
    ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 0}, "pass 0"),
    ("MixtralForCausalLM", {"num_local_experts": 10**9}, "num_local_experts = 1000000000, more than"),
    ("Qwen3MoeForCausalLM", {"num_experts": 8, "moe_intermediate_size": 0}, "an inner size of 0"),
    ("Qwen3MoeForCausalLM", {"num_experts": 8, "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    ("Ernie4_5_MoeForCausalLM", {"moe_num_experts": 8, "moe_layer_interval": 0}, "moe_layer_interval = 0"),
    ("Glm4MoeForCausalLM", {"n_routed_experts": 8, "n_group": 3}, "8 experts in 3 groups"),
    ("Glm4MoeForCausalLM", {"n_routed_experts": 8, "n_group": 2, "topk_group": 3}, "from the best 3"),
    ("Glm4MoeForCausalLM", {"n_routed_experts": 8, "n_group": 4, "topk_group": 1}, "takes 8 from the best 1"),
    ("Glm4MoeForCausalLM", {"n_routed_experts": 8, "n_group": 8, "topk_group": 8}, "8 groups .* of one expert"),
    ("Glm4MoeForCausalLM", {"n_routed_experts": 8, "routed_scaling_factor": "x"}, "routed_scaling_factor = 'x'"),
    ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling = 0, a number above 0"),
    ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0, a number above 0"),
    ("MPTForCausalLM", {"expansion_ratio": float("nan")}, "expansion_ratio = nan"),
    ("MPTForCausalLM", {"attn_config": []}, "attn_config = .., an object"),
    ("MPTForCausalLM", {"attn_config": {"clip_qkv": "x"}}, "clip_qkv = 'x'"),
    ("Llama4ForCausalLM", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step = 0"),
    ("Llama4ForCausalLM", {"no_rope_layer_interval": None, "num_hidden_layers": []}, "num_hidden_layers = .., a whole"),
    ("Exaone4ForCausalLM", {"sliding_window_pattern": 1.5}, "sliding_window_pattern = 1.5"),
    ("DeepseekV3ForCausalLM", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers = 1000000000"),
]


@pytest.mark.parametrize(("name", "keys", "message"), HOSTILE)
def test_a_config_that_makes_no_model_is_refused_in_a_sentence(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        build(name, **keys)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_slides_only_where_it_is_told_to(name: str) -> None:
    layers = {"num_hidden_layers": 4, "sliding_window": 16, "max_window_layers": 2}
    assert [b.attn.window for b in build(name, **layers).blocks] == [0] * 4
    assert [b.attn.window for b in build(name, **layers, use_sliding_window=True).blocks] == [0, 0, 16, 16]


def test_gemma_3_1b_says_neither_that_its_head_is_tied_nor_which_layers_slide() -> None:
    """The keys of the published file."""
    said = {"sliding_window": 16, "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000}
    model = build("Gemma3ForCausalLM", **said, num_hidden_layers=7, rope_scaling=None, hidden_activation="silu")
    assert model.lm_head is None
    assert [b.attn.window for b in model.blocks] == [16] * 5 + [0, 16]
    assert model.blocks[0].attn.rope != model.blocks[5].attn.rope
