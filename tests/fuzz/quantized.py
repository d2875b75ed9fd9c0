"""Checkpoints of every quantization method, as small as they can be: what the fuzzers start from."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save

from tests.quant import (
    packing,
    test_bitsandbytes,
    test_compressed_tensors,
    test_fp8,
    test_hqq,
    test_modelopt,
    test_quanto,
    test_torchao,
)

HIDDEN, VOCABULARY = 64, 48
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens": (VOCABULARY, HIDDEN),
    "model.norm": (HIDDEN,),
    "model.layers.0.input_layernorm": (HIDDEN,),
    "model.layers.0.post_attention_layernorm": (HIDDEN,),
    "model.layers.0.self_attn.q_proj": (64, HIDDEN),
    "model.layers.0.self_attn.k_proj": (32, HIDDEN),
    "model.layers.0.self_attn.v_proj": (32, HIDDEN),
    "model.layers.0.self_attn.o_proj": (HIDDEN, 64),
    "model.layers.0.mlp.gate_proj": (96, HIDDEN),
    "model.layers.0.mlp.up_proj": (96, HIDDEN),
    "model.layers.0.mlp.down_proj": (HIDDEN, 96),
}
"""Of the matrices and vectors of a Llama."""

Parts = dict[str, torch.Tensor]
GROUP = 32


class Quantized(NamedTuple):
    said: dict[str, Any]
    """quantization_config."""
    parts: Callable[[torch.Tensor], Parts]
    """Tensors of a matrix by ending."""
    metadata: Callable[[torch.Tensor], dict[str, Any]] | None = None
    """What the file says of each matrix."""


def _numpy(parts: dict[str, Any]) -> Parts:
    return {f".{name}": torch.from_numpy(np.ascontiguousarray(values)) for name, values in parts.items()}


def _gptq(bits: int, act_order: bool) -> Quantized:
    def parts(weight: torch.Tensor) -> Parts:
        n_in = weight.shape[1]
        groups = packing.shuffled(n_in, GROUP, 0) if act_order else packing.consecutive(n_in, GROUP)
        return _numpy(packing.gptq(packing.rounded(weight.numpy(), bits, groups)))

    return Quantized({"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order}, parts)


def _awq(version: str) -> Quantized:
    def parts(weight: torch.Tensor) -> Parts:
        groups = packing.consecutive(weight.shape[1], GROUP)
        return _numpy(packing.awq(packing.rounded(weight.numpy(), 4, groups), version, GROUP))

    said = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": version}
    return Quantized(said, parts)


def _fp8(weight: torch.Tensor) -> Parts:
    blocks = torch.ones(-(-weight.shape[0] // 32), -(-weight.shape[1] // 32))
    return {".weight": weight.to(torch.float8_e4m3fn), ".weight_scale_inv": blocks}


def _modelopt(weight: torch.Tensor) -> Parts:
    codes = torch.zeros(len(weight), weight.shape[1] // 2, dtype=torch.uint8)
    scales = torch.ones(len(weight), weight.shape[1] // 16).to(torch.float8_e4m3fn)
    return {".weight": codes, ".weight_scale": scales, ".weight_scale_2": torch.tensor(0.5)}


def _mxfp4(weight: torch.Tensor) -> Parts:
    """Beside the plain matrix: experts of a model that this one is not."""
    codes = torch.zeros(2, 4, 3, 16, dtype=torch.uint8)
    return {".weight": weight, ".e_blocks": codes, ".e_scales": torch.full((2, 4, 3), 127, dtype=torch.uint8)}


def _modelopt_exponents(weight: torch.Tensor) -> Parts:
    """MXFP8."""
    scales = torch.full((len(weight), weight.shape[1] // 32), 126, dtype=torch.uint8)
    return {".weight": weight.to(torch.float8_e4m3fn), ".weight_scale": scales}


def _torchao_tiles(weight: torch.Tensor) -> Parts:
    rows, columns = weight.shape
    words = torch.zeros(-(-rows // 8), -(-columns // 128), 32, 4, dtype=torch.int32)
    both = torch.ones(32 * 4 * words.shape[1] // GROUP, 8 * len(words), 2, dtype=torch.bfloat16)
    return test_torchao.named({"qdata": words, "scale_and_zero": both})


def _torchao_floats(weight: torch.Tensor) -> Parts:
    return test_torchao.named({"qdata": weight.to(torch.float8_e4m3fn), "scale": torch.ones(len(weight), 1)})


def _sized(said: dict[str, Any], **data: Any) -> dict[str, Any]:
    return said | {"_data": said.get("_data", {}) | data}


def _auto_round(packing_format: str, parts: Callable[[torch.Tensor], Parts], **said: Any) -> Quantized:
    common = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "data_type": "int"}
    return Quantized(common | {"packing_format": packing_format} | said, parts)


def _auto_rounds() -> list[Quantized]:
    mxfp4 = {"data_type": "mx_fp", "act_bits": 4}
    return [
        _auto_round("auto_round:auto_gptq", _gptq(4, False).parts),
        _auto_round("auto_round", _gptq(2, False).parts, bits=2, extra_config={"model.norm": {"bits": 16}}),
        _auto_round("auto_round:auto_awq", _awq("gemm").parts),
        _auto_round("auto_round:llm_compressor", _compressed("mxfp4").parts, **mxfp4),
        _auto_round("auto_round:llm_compressor", _compressed("nvfp4").parts, data_type="nv_fp", group_size=16),
        _auto_round("auto_round:fp8_static", lambda w: test_fp8.per_channel(w)[0], bits=8, data_type="fp"),
    ]


def _compressed(scheme: str) -> Quantized:
    form, weights, _ = test_compressed_tensors.SCHEMES[scheme]
    said = test_compressed_tensors.config({"Linear": weights}, form)
    return Quantized(said, lambda weight: test_compressed_tensors.made(weight, scheme)[0])


def _all() -> list[Quantized]:
    hqq, nested = test_hqq.SAID, {"load_in_4bit": True, "quant_method": "bitsandbytes"}
    return [
        _gptq(4, True),
        _gptq(3, False),
        _gptq(8, False),
        _awq("gemm"),
        _awq("gemv"),
        Quantized({"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}, _fp8),
        Quantized({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, _modelopt),
        Quantized({"quant_method": "mxfp4"}, _mxfp4),
        Quantized({"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32}, _modelopt_exponents),
        Quantized(test_modelopt.SAID, lambda weight: test_modelopt.awq(weight, GROUP)[0]),
        Quantized(test_modelopt.SAID, lambda weight: test_modelopt.smoothed(weight, GROUP)[0]),
        Quantized(test_modelopt.SAID | {"quant_algo": "W8A16"}, lambda weight: test_modelopt.int8(weight)[0]),
        *_auto_rounds(),
        Quantized(test_quanto.SAID | {"weights": "int8"}, lambda weight: test_quanto.int8(weight)[0]),
        Quantized(test_quanto.SAID, lambda weight: test_quanto.small(weight, 4, 32)[0]),
        Quantized(test_quanto.SAID | {"weights": "int2"}, lambda weight: test_quanto.small(weight, 2, 32)[0]),
        *map(_compressed, ("w4-group32-asym", "w3-group32-asym", "w8-channel", "w8a8-channel-asym", "w4-group16")),
        *map(_compressed, ("fp8-block", "fp8-tensor", "mxfp8", "nvfp4", "mxfp4")),
        Quantized(nested, lambda weight: test_bitsandbytes.nf4(weight)[0]),
        Quantized({"quant_method": "bitsandbytes", "load_in_8bit": True}, lambda w: test_bitsandbytes.int8(w)[0]),
        Quantized(hqq, lambda weight: test_hqq.hqq(weight, 4, GROUP)[0]),
        Quantized(hqq, lambda weight: test_hqq.hqq(weight, 3, GROUP, 0)[0]),
        Quantized(hqq, lambda weight: test_hqq.hqq(weight, 8, GROUP)[0]),
        Quantized(test_torchao.SAID, lambda weight: test_torchao.int8(weight)[0], lambda _: test_torchao.INT8),
        Quantized(test_torchao.SAID, lambda weight: test_torchao.intx(weight)[0], lambda _: test_torchao.INTX),
        Quantized(test_torchao.SAID, lambda weight: test_torchao.int4(weight)[0], lambda _: test_torchao.INT4),
        Quantized(test_torchao.SAID, _torchao_tiles, lambda w: _sized(test_torchao.TILES, shape=list(w.shape))),
        Quantized(
            test_torchao.SAID, _torchao_floats, lambda w: _sized({"_type": "Float8Tensor"}, block_size=[1, w.shape[1]])
        ),
    ]


@functools.cache
def checkpoints() -> list[bytes]:
    """config.json, a zero byte, a safetensors file: of each method one or more."""
    values = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=values) for name, shape in SHAPES.items()}
    out = []
    for said, parts, metadata in _all():
        tensors, told = {}, {}
        for name, weight in weights.items():
            if "_proj" in name:
                tensors.update({name + ending: part.contiguous() for ending, part in parts(weight).items()})
                told[f"{name}.weight"] = json.dumps(metadata(weight) if metadata else None)
            else:
                tensors[f"{name}.weight"] = weight.half()
        config = json.dumps({**LLAMA, "quantization_config": said}).encode()
        out.append(config + b"\0" + save(tensors, told if metadata else {}))
    return out
