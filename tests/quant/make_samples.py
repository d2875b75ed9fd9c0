"""Writes `samples/`: matrices as bitsandbytes, HQQ, ModelOpt, optimum-quanto and torchao save them, and the values that
each reads back.

Tests only read the files, so that these packages need not be installed for them. To write them again:

    pip install --no-deps bitsandbytes==0.50.2 hqq==0.2.8.post1 torchao==0.18.0 termcolor \\
        nvidia-modelopt==0.47.0 omegaconf pulp optimum-quanto==0.2.7
    python -m tests.quant.make_samples

What a maker reads back is what its own Python code computes in float32. bitsandbytes' compiled CPU kernel is not asked:
where rows are no whole number of blocks, version 0.50.2 begins the blocks anew in each row, which is not how they were
quantized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SAMPLES = Path(__file__).parent / "samples"


def write(method: str, tensors: dict[str, Any], values: dict[str, Any], metadata: dict[str, str]) -> None:
    SAMPLES.mkdir(exist_ok=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, SAMPLES / f"{method}.safetensors", metadata)
    save_file({k: v.contiguous() for k, v in values.items()}, SAMPLES / f"{method}-values.safetensors")


def bitsandbytes() -> None:
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.backends.utils import _get_4bit_code
    from bitsandbytes.functional import (
        dequantize_blockwise,
        int8_vectorwise_dequant,
        int8_vectorwise_quant,
        quantize_4bit,
    )

    tensors, values = {}, {}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            for block in (64, 256):
                for shape in ((12, 64), (5, 96), (6, 20), (5, 7)):
                    name = f"{kind}.{'nested' if nested else 'plain'}.{block}.{shape[0]}x{shape[1]}"
                    packed, state = quantize_4bit(
                        torch.randn(shape), blocksize=block, compress_statistics=nested, quant_type=kind
                    )
                    tensors |= {f"{name}.weight": packed}
                    tensors |= {f"{name}.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
                    maxima = state.absmax
                    if nested:
                        maxima = dequantize_blockwise(maxima, state.state2) + state.offset
                    table = _get_4bit_code(kind, "cpu")
                    values[f"{name}.weight"] = _dequantize_4bit_compute(
                        packed.reshape(-1), maxima, table, block, shape, torch.float32
                    )
    for shape in ((9, 128), (5, 96), (3, 20)):
        name = f"int8.{shape[0]}x{shape[1]}"
        codes, maxima, _ = int8_vectorwise_quant(torch.randn(shape).half())
        tensors |= {f"{name}.weight": codes, f"{name}.SCB": maxima, f"{name}.weight_format": torch.tensor(0).byte()}
        values[f"{name}.weight"] = int8_vectorwise_dequant(codes, maxima)
    write("bitsandbytes", tensors, values, {})


def hqq() -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    tensors, values = {}, {}
    for bits in (8, 6, 4, 3, 2, 1):
        for axis in (0, 1):
            for group in (64, 16, None) if bits == 4 else (64,):
                linear = torch.nn.Linear(96, 16, bias=False)
                as_float = (bits, axis, group) in ((4, 1, 64), (3, 0, 64))
                config = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis, view_as_float=as_float)
                made = HQQLinear(linear, config, compute_dtype=torch.float16, device="cpu")
                name = f"{bits}.{axis}.{group}"
                tensors |= {f"{name}.{k}": v for k, v in made.state_dict().items()}
                meta = dict(made.meta) | {"compute_dtype": torch.float32}
                meta |= {k: meta[k].float() for k in ("scale", "zero")}
                values[f"{name}.weight"] = Quantizer.dequantize(made.W_q, meta)
    write("hqq", tensors, values, {})


def torchao() -> None:
    from torchao.prototype.gptq.api import _int4_row_dequantize_zp
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int4Tensor,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        MappingType,
        quantize_,
    )
    from torchao.quantization.granularity import PerGroup, PerTensor

    configs = {
        "int8": Int8WeightOnlyConfig(),
        "int8.groups": Int8WeightOnlyConfig(granularity=PerGroup(32)),
        "int8.tensor": Int8WeightOnlyConfig(granularity=PerTensor()),
        "8da4w": Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
        "float8": Float8WeightOnlyConfig(),
        "float8.tensor": Float8WeightOnlyConfig(granularity=PerTensor()),
    }
    for bits in (8, 4, 3):
        for mapping in (MappingType.SYMMETRIC, MappingType.ASYMMETRIC):
            for group in (16, 32):
                configs[f"intx.{bits}.{mapping.name.lower()}.{group}"] = IntxWeightOnlyConfig(
                    weight_dtype=getattr(torch, f"int{bits}"), granularity=PerGroup(group), mapping_type=mapping
                )
    weights, values = {}, {}
    for name, config in configs.items():
        layer = torch.nn.Linear(96, 12, bias=False).bfloat16()
        quantize_(layer, config)
        weight = weights[f"{name}.weight"] = layer.weight.data
        values[f"{name}.weight"] = wide(weight)
    # Int4Tensor is made by GPU code: here of numbers drawn, as torchao's documentation of the class says.
    q = torch.randint(-8, 8, (12, 96), dtype=torch.int8)
    scale, zero = (torch.randn(3, 12).bfloat16() for _ in range(2))
    packed = (q[:, ::2] & 15) | (q[:, 1::2] << 4)
    weights["int4.weight"] = Int4Tensor(packed, scale, zero, [1, 32], torch.Size((12, 96)))
    values["int4.weight"] = _int4_row_dequantize_zp(q, scale.float(), zero.float(), 32)
    tensors, metadata = flatten_tensor_state_dict(weights)
    write("torchao", tensors, values, metadata)
    torch.save({"plain": torch.ones(3), **weights}, SAMPLES / "torchao.bin")


def wide(weight: Any) -> Any:
    """What `dequantize` computes, in float32."""
    from torchao.quantization.quant_primitives import dequantize_affine

    if weight.qdata.dtype == torch.int8:
        return dequantize_affine(
            weight.qdata, weight.block_size, weight.scale.float(), weight.zero_point, torch.int8, -128, 127
        )
    return weight.dequantize(torch.float32)


def modelopt() -> None:
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    tensors, values = {}, {}

    def add(name: str, packed: Any, scale: Any, value: Any, **more: Any) -> None:
        parts = {"weight": packed, "weight_scale": scale} | more
        tensors.update({f"{name}.{part}": tensor for part, tensor in parts.items()})
        values[f"{name}.weight"] = value

    weight = torch.randn(12, 96)
    for kind, block in (("int4_awq", 32), ("w4a8_awq", 96), ("int4_awq", 16)):
        by = weight.reshape(12, -1, block).abs().amax(-1) / 7
        wide = by.repeat_interleave(block, 1)
        packed = to_quantized_weight(weight, by, kind, block_size=block)
        value = (weight / wide).round().clamp(-8, 7) * wide
        add(f"{kind}.{block}", packed, by, value)
        smooth = torch.rand(96) + 0.5
        add(f"{kind}.{block}.smooth", packed.clone(), by.clone(), value * smooth, pre_quant_scale=smooth)
    by = weight.abs().amax(-1) / 127
    packed = to_quantized_weight(weight, by, "int8_sq")
    add("int8", packed, by, packed * by[:, None])
    large = torch.randn(128, 256)
    by = large.reshape(1, 128, 2, 128).abs().amax((1, 3), keepdim=True) / 448
    packed = to_quantized_weight(large, by, "fp8_pb_wo", block_size=128)
    wide = by[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)
    add("fp8_pb_wo", packed, by, packed.float() * wide)
    by = weight.abs().amax(-1) / 448
    packed = to_quantized_weight(weight, by, "fp8_pc_pt")
    add("fp8_pc_pt", packed, by, packed.float() * by[:, None])
    made, by = MXFP8QTensor.quantize(weight)
    add("mxfp8", made._quantized_data, by, made.dequantize(torch.float32, scale=by))
    made, by = MXFP4QTensor.quantize(weight, 32)
    value = made.dequantize(torch.float32, scale=by, block_sizes={-1: 32})
    add("mxfp4", made._quantized_data, by.reshape(12, -1), value)
    made, by, whole = NVFP4QTensor.quantize(weight, 16)
    value = made.dequantize(torch.float32, scale=by, double_scale=whole, block_sizes={-1: 16})
    add("nvfp4", made._quantized_data, by, value, weight_scale_2=whole)
    write("modelopt", tensors, values, {})


def quanto() -> None:
    from optimum.quanto import freeze, qfloat8, qint2, qint4, qint8, quantize

    tensors, values = {}, {}
    for kind in (qint8, qfloat8, qint4, qint2):
        for dtype in (torch.float32, torch.bfloat16):
            for shape in ((16, 256), (16, 96), (7, 160), (6, 32), (5, 200)):
                name = f"{kind.name}.{str(dtype).removeprefix('torch.')}.{shape[0]}x{shape[1]}"
                module = torch.nn.Sequential(torch.nn.Linear(shape[1], shape[0], bias=False)).to(dtype)
                quantize(module, weights=kind)
                freeze(module)
                state = {k.removeprefix("0."): v for k, v in module.state_dict().items()}
                tensors |= {f"{name}.{k}": v for k, v in state.items()}
                values[f"{name}.weight"] = in_float(state)
    write("quanto", tensors, values, {})


def in_float(state: dict[str, Any]) -> Any:
    """What `dequantize` of quanto computes, in float32; of less than 8 bits [groups, columns of one]."""
    from optimum.quanto.tensor.packed import PackedTensor

    scale = state["weight._scale"].float()
    if "weight._data" in state:
        return scale * state["weight._data"].float()
    packed, groups = state["weight._data._data"], len(scale)
    bits = 4 if 2 * len(packed) - groups in (0, 1) else 2
    data = PackedTensor(packed, bits, (groups, packed.shape[1]), (packed.shape[1], 1)).unpack()
    return scale * data - state["weight._shift"].float()


if __name__ == "__main__":
    torch.manual_seed(0)
    for make in (bitsandbytes, hqq, torchao, modelopt, quanto):
        make()
