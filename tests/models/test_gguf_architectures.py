"""GGUF files of every family, written by llama.cpp's own converter from the tiny checkpoints, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.devices import make_device
from tests.models.converter import Converter
from tests.models.test_parity import PROMPTS, Checkpoints, prompt
from tests.models.tiny import VARIANTS, Loaded

_ACTIVATION = "files do not say the activation"
_BAICHUAN = "files have a normalized head by their vocabulary, ALiBi by their number of layers"
_BIAS = "there are no biases in this family's files"
_HEAD = "files say a part of the head rotates where it is not hidden size / heads wide, or do not say its size"
_HUNYUAN = "the converter knows the lengths of the released models only"
_LLAMA4 = "chunks, temperatures and layers without positions are those of the release"
_MSCALE = "files say one of two scales, which are the same in all releases"
_PERIOD = "files do not say which layers slide"
_PLAIN_LAYERS = "the converter does not know layers without experts"
_ROPE = "the converter leaves out how RoPE is scaled"
_SCALE = "files do not say the scale of attention"
_TABLE = "in files the last ids have embeddings of 0 in every layer's table"
_THETA = "files do not say the base of RoPE"
_UNKNOWN = "the converter does not know the family"
_WINDOW = "files do not say the window"

INEXPRESSIBLE = {
    "apertus-bias-relu2": _ACTIVATION,
    "baichuan-13b": _BAICHUAN,
    "baichuan2": _BAICHUAN,
    "baichuan2-13b": _BAICHUAN,
    "cohere-qk-norm": "files have no head of its own",
    "cohere2-2024": _PERIOD,
    "deepseek-v2-lite-yarn": _MSCALE,
    "deepseek-v3-every-second": "files do not say which layers have experts",
    "deepseek-v3-halves": "rotary pairs are neighbours in all files",
    "deepseek-v3-published": _MSCALE,
    "ernie-moe-some-layers": "files do not say moe_norm_min",
    "exaone-tied-bias": _HEAD,
    "falcon-11b": _THETA,
    "falcon-alibi-6-heads": "files do not say ALiBi",
    "falcon-rw": "the converter does not know its norms",
    "galactica": _UNKNOWN,
    "gemma-bias-gelu": _BIAS,
    "gemma2": _SCALE,
    "gemma2-no-caps": _SCALE,
    "gemma3": _PERIOD,
    "gemma3n": _TABLE,
    "gemma3n-other": "there are four streams in all files",
    "gemma3n-published": _TABLE,
    "glm": _HEAD,
    "gpt-bigcode-mha": "there is one KV head in all files",
    "gpt-neox-sequential": _THETA,
    "gpt-oss-full-tied": _PERIOD,
    "gpt2-scales": _ACTIVATION,
    "gpt2-unscaled": _SCALE,
    "gptj": _UNKNOWN,
    "gptj-all-rotated": _UNKNOWN,
    "helium": _UNKNOWN,
    "helium-grouped-bias-tied": _UNKNOWN,
    "hunyuan": _HUNYUAN,
    "hunyuan-moe-layers": "files say one number of experts for all layers",
    "hunyuan-moe-published": _HUNYUAN,
    "hunyuan-release": _HUNYUAN,
    "internlm2-bias": "the converter cannot reshape the biases",
    "kimi-k2": _MSCALE,
    "llama-mqa": _ACTIVATION,
    "llama-rope-dynamic-stretched": _ROPE,
    "llama-rope-long": _ROPE,
    "llama-rope-long-factor": _ROPE,
    "llama-rope-long-short": _ROPE,
    "llama-rope-yarn-mscale": _ROPE,
    "llama-rope-yarn-untruncated": _ROPE,
    "llama4": _LLAMA4,
    "llama4-every-second": _LLAMA4,
    "llama4-published": _LLAMA4,
    "llama4-unchunked": _LLAMA4,
    "ministral": _UNKNOWN,
    "ministral-mixed": _UNKNOWN,
    "ministral3-window": _WINDOW,
    "mistral-window": _WINDOW,
    "mixtral-window": _WINDOW,
    "mpt-clip": _SCALE,
    "nemotron-biases": _HEAD,
    "olmo-bias": "the converter puts the rows of q and k in another order, but not their biases",
    "olmoe-clipped": "files do not say the clipping",
    "opt": _UNKNOWN,
    "opt-350m": _UNKNOWN,
    "opt-no-final-norm": _UNKNOWN,
    "phi-gqa": "there are as many KV heads as others in all files",
    "phimoe": "files do not say the router's jitter",
    "phimoe-published": "files do not say the router's jitter",
    "qwen2-moe-some-layers": _PLAIN_LAYERS,
    "qwen2-window": _WINDOW,
    "qwen3-moe-some-layers": _PLAIN_LAYERS,
    "smollm3-window": _WINDOW,
    "starcoder2-window": _WINDOW,
}
"""Variants whose model a GGUF file cannot say, and why; so llama.cpp cannot run them either."""

CONVERTED = [name for name in VARIANTS if name not in INEXPRESSIBLE]

SAID: dict[str, dict[str, Any]] = {
    "Cohere2ForCausalLM": {"rotary_pct": 1.0},
    "DeepseekV3ForCausalLM": {"scoring_func": "sigmoid"},
    "Ernie4_5_MoEForCausalLM": {"architectures": ["Ernie4_5_MoeForCausalLM"]},
    "ExaoneForCausalLM": {"activation_function": "silu"},
    "GPT2LMHeadModel": {"n_ctx": 512},
    "GPTNeoXForCausalLM": {"rotary_pct": 0.25},
    "GlmForCausalLM": {"layernorm_epsilon": 1.5625e-07},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": [32] * 3, "moe_topk": [3] * 3, "num_shared_expert": [1] * 3},
    "MptForCausalLM": {"architectures": ["MPTForCausalLM"]},
    "PhimoeForCausalLM": {"architectures": ["PhiMoEForCausalLM"], "original_max_position_embeddings": 512},
    "falcon-7b": {"num_kv_heads": 1},
    "mpt-positions": {"attn_config": {"alibi": False, "clip_qkv": None}},
}
"""By architecture, or by variant, keys that published config.json files have and transformers does not pass on."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def converter() -> Iterator[Converter]:
    with Converter() as running:
        yield running


def convert(converter: Converter, folder: Path, file: Path, kind: str = "f32") -> Path:
    """The file of a folder, to which comes a vocabulary: one converter looks at its size."""
    config = json.loads((folder / "config.json").read_text())
    vocabulary = {f"<{i}>": i for i in range(config["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": []}))
    return converter(folder, file, SAID.get(config["architectures"][0], {}) | SAID.get(folder.name, {}), kind)


def test_the_list_of_exceptions_names_variants() -> None:
    assert INEXPRESSIBLE.keys() < VARIANTS.keys()


@pytest.mark.parametrize("variant", CONVERTED)
def test_logits_of_a_file_equal_transformers(variant: str, checkpoints, converter, tmp_path: Path) -> None:
    folder, oracle = checkpoints[variant]
    loaded = Loaded(convert(converter, folder, tmp_path / "m.gguf"), make_device("reference"))
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        with torch.no_grad():
            want = oracle(torch.tensor([ids])).logits[0].numpy()
        np.testing.assert_allclose(loaded.logits(ids), want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", CONVERTED)
def test_quantized_matrices_lie_where_plain_ones_do(variant: str, checkpoints, converter, tmp_path: Path) -> None:
    """A file of Q8_0 matrices on the native device gives the logits of the same values on the reference."""
    file = convert(converter, checkpoints[variant][0], tmp_path / "m.gguf", "q8_0")
    ids = prompt(1, 40)
    want = Loaded(file, make_device("reference")).logits(ids)
    np.testing.assert_allclose(Loaded(file, make_device("cpu")).logits(ids), want, rtol=0, atol=5e-4)


def test_experts_may_be_tensors_of_their_own(checkpoints, converter, tmp_path: Path) -> None:
    """As in the first files of Mixtral."""
    ids = prompt(1, 40)
    stacked = converter(checkpoints["mixtral"][0], tmp_path / "stacked.gguf", {})
    reader = gguf.GGUFReader(stacked)
    writer = gguf.GGUFWriter(tmp_path / "apart.gguf", "llama")
    for field in reader.fields.values():
        if field.name.startswith("llama."):
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if "_exps." in tensor.name:
            for expert, matrix in enumerate(tensor.data):
                writer.add_tensor(tensor.name.replace("_exps.", f".{expert}."), matrix)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want, got = (Loaded(file, make_device("cpu")).logits(ids) for file in (stacked, tmp_path / "apart.gguf"))
    np.testing.assert_array_equal(got, want)


def test_the_first_files_of_chatglm_have_q_k_and_v_in_one_matrix(checkpoints, converter, tmp_path: Path) -> None:
    """A GLM-4 in the layout of ChatGLM's own code (modeling_chatglm.py in the repositories of the models)."""
    folder, oracle = checkpoints["glm-2024"]
    config, old = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    new = {
        "transformer.embedding.word_embeddings.weight": old["model.embed_tokens.weight"],
        "transformer.encoder.final_layernorm.weight": old["model.norm.weight"],
        "transformer.output_layer.weight": old["lm_head.weight"],
    }
    for i in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{i}.", f"transformer.encoder.layers.{i}."
        for word, name in (
            ("input_layernorm", "input_layernorm"),
            ("post_attention_layernorm", "post_attention_layernorm"),
            ("self_attn.o_proj", "self_attention.dense"),
            ("mlp.gate_up_proj", "mlp.dense_h_to_4h"),
            ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ):
            new[f"{theirs}{name}.weight"] = old[f"{ours}{word}.weight"]
        for ending in ("weight", "bias"):
            parts = [old[f"{ours}self_attn.{x}_proj.{ending}"] for x in "qkv"]
            new[f"{theirs}self_attention.query_key_value.{ending}"] = np.concatenate(parts)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["ChatGLMModel"],
                "model_type": "chatglm",
                "hidden_size": config["hidden_size"],
                "ffn_hidden_size": config["intermediate_size"],
                "num_layers": config["num_hidden_layers"],
                "num_attention_heads": config["num_attention_heads"],
                "multi_query_group_num": config["num_key_value_heads"],
                "seq_length": config["max_position_embeddings"],
                "layernorm_epsilon": 1.5625e-07,
            }
        )
    )
    save_file(new, tmp_path / "model.safetensors")
    loaded = Loaded(converter(tmp_path, tmp_path / "m.gguf", {}), make_device("reference"))
    ids = prompt(1, 40)
    with torch.no_grad():
        want = oracle(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(loaded.logits(ids), want, rtol=0, atol=2e-4)
