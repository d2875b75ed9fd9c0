"""SmolLM2 written in every weight format: from the float32 values of `tests.realmodels.smollm2_hf`.

Matrices of the layers are quantized. The table of embeddings, which is the head too, is float16 in folders; in GGUF
files that are quantized it is Q8_0, as in llama.cpp's own file of this model. Everything is rounded to nearest, which
is what makers do who look at no data; calibrated files of AWQ and GPTQ lose less, and HQQ's maker optimizes zero
points. Groups have 64 or 32 inputs, as 576 is no multiple of 128.

The values are those of a Q4_1 file: formats with 16 evenly spaced values for the same 32 weights find them again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.formats import ggml
from octavo.quant.codebook import E2M1_16, FP4_32, NF4_32, Codebook
from tests import realmodels
from tests.quant import packing, test_bitsandbytes, test_compressed_tensors, test_hqq, test_torchao

Parts = dict[str, torch.Tensor]
GROUP = 64


class Written(NamedTuple):
    """A format that is written into files."""

    name: str
    by: str
    """Whose code rounds and packs."""
    write: Callable[[Path, Path], None]
    """Into a path that does not exist; the second is a folder for what is to be kept."""
    suffix: str = ""
    slow: bool = False
    """Takes from several minutes to an hour."""


def place_of(written: Written, folder: Path) -> Path:
    """Where in `folder` the model in this format is, or would be."""
    return folder / (written.name.replace(" ", "-") + written.suffix)


def path_of(written: Written, folder: Path) -> Path:
    """The model in this format, in `folder`; written first where it is not there, as a whole or not at all."""
    target = place_of(written, folder)
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder))
        try:
            written.write(made / target.name, folder)
            (made / target.name).rename(target)
        finally:
            shutil.rmtree(made)
    return target


def matrix_bits(path: Path) -> float:
    """Bits of a weight of the layers' matrices in the files, with all scales."""
    if path.suffix == ".gguf":
        matrices = [t for t in gguf.GGUFReader(path).tensors if t.name.startswith("blk.") and len(t.shape) == 2]
        return float(8 * sum(t.n_bytes for t in matrices) / sum(t.n_elements for t in matrices))
    tensors = load_file(path / "model.safetensors")
    size = sum(t.nbytes for name, t in tensors.items() if "_proj." in name)
    source = load_file(realmodels.smollm2_hf() / "model.safetensors")
    return 8 * size / sum(t.numel() for name, t in source.items() if "_proj." in name)


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_file(kind: str) -> Written:
    by = "gguf" if kind in PLAIN else "ggml"
    return Written(f"GGUF {kind}", by, lambda path, kept: _write_gguf(path, kind, kept), ".gguf", kind in SLOW)


def _write_gguf(path: Path, kind: str, kept: Path) -> None:
    """All that the model's own file says, with its matrices as `kind`."""
    plain = kind in PLAIN
    quantize = None if plain else ggml.Quantizer(kept)
    source = gguf.GGUFReader(realmodels.smollm2_gguf())
    writer = gguf.GGUFWriter(path, "llama")
    for field in source.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    for tensor in source.tensors:
        data, said = tensor.data, tensor.tensor_type
        if len(tensor.shape) == 2 and (plain or tensor.name.startswith("blk.")):
            values = gguf.dequantize(data, said)
            name = kind if plain else ggml.fitting(kind, values.shape[1])
            said = gguf.GGMLQuantizationType[name]
            data = gguf.quantize(values, said) if quantize is None else quantize(values, name)
        writer.add_tensor(tensor.name, data, raw_dtype=said)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PLAIN = {"F32", "F16", "BF16"}
SLOW = {"IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S"}
GGUF = (
    *("F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS"),
    *("MXFP4", "NVFP4", "Q3_K", "IQ3_S", "IQ3_XXS", "Q2_K", "IQ2_S", "IQ2_XS", "IQ2_XXS", "TQ2_0", "TQ1_0"),
    *("IQ1_M", "IQ1_S"),
)


# -- folders -----------------------------------------------------------------------------------------------------------


def folder(
    name: str,
    by: str,
    quantize: Callable[[torch.Tensor], Parts],
    said: dict[str, Any],
    metadata: Callable[[str], dict[str, str]] = lambda module: {},
) -> Written:
    """A folder where `quantize` makes the tensors, by ending, of each matrix of the layers; `said` is its
    quantization_config, `metadata` what the file says of a module."""

    def write(path: Path, _: Path) -> None:
        source = realmodels.smollm2_hf()
        tensors: Parts = {}
        told: dict[str, str] = {}
        for key, value in load_file(source / "model.safetensors").items():
            if key.endswith("_proj.weight"):
                module = key.removesuffix(".weight")
                tensors |= {module + ending: part.contiguous() for ending, part in quantize(value).items()}
                told |= metadata(module)
            else:
                tensors[key] = value.half()
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("model.safetensors"))
        save_file(tensors, path / "model.safetensors", {"format": "pt", **told})
        config = json.loads((source / "config.json").read_text()) | {"dtype": "float16"}
        more = {"quantization_config": said} if said else {}
        (path / "config.json").write_text(json.dumps(config | more))

    return Written(name, by, write)


def plain(kind: torch.dtype) -> Written:
    return folder(f"folder {str(kind).removeprefix('torch.')}", "torch", lambda w: {".weight": w.to(kind)}, {})


def compressed(name: str, scheme: str, weights: dict[str, Any], form: str) -> Written:
    said = test_compressed_tensors.config({"Linear": weights}, form)
    return folder(name, "compressed-tensors", lambda w: test_compressed_tensors.made(w, scheme, torch.float16)[0], said)


def fp8_channels(weight: torch.Tensor) -> Parts:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return {".weight": (weight / scale).to(torch.float8_e4m3fn), ".weight_scale": scale}


def fp8_blocks(weight: torch.Tensor) -> Parts:
    """A scale for each 128 x 128, of which those at the ends are cut."""
    rows, columns = weight.shape
    wide = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    cells = wide.reshape(wide.shape[0] // 128, 128, wide.shape[1] // 128, 128)
    scale = cells.abs().amax((1, 3)) / 448
    codes = (cells / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(wide.shape)[:rows, :columns]
    return {".weight": codes, ".weight_scale_inv": scale}


def nvfp4(weight: torch.Tensor) -> Parts:
    """As ModelOpt keeps it, which multiplies by the matrix's scale where compressed-tensors divides."""
    blocks = weight.reshape(len(weight), -1, 16)
    most = blocks.abs().amax(2) / 6
    whole = most.max() / 448
    scale = (most / whole).to(torch.float8_e4m3fn)
    codes = nearest(blocks / (scale.float() * whole)[..., None], E2M1_16.values).reshape(weight.shape)
    return {".weight": codes[:, ::2] | codes[:, 1::2] << 4, ".weight_scale": scale, ".weight_scale_2": whole}


def nearest(values: torch.Tensor, table: Sequence[float]) -> torch.Tensor:
    """uint8: for each value the index of the nearest in the table."""
    ordered, index = torch.tensor(table).sort()
    return index[torch.bucketize(values, (ordered[1:] + ordered[:-1]) / 2)].to(torch.uint8)


def awq(weight: torch.Tensor) -> Parts:
    groups = packing.consecutive(weight.shape[1], GROUP)
    return _tensors(packing.awq(packing.rounded(weight.numpy(), 4, groups), "gemm", GROUP))


def gptq(bits: int, act_order: bool) -> Written:
    """Act-order: inputs are drawn into groups, where GPTQ looks at activations for that."""

    def quantize(weight: torch.Tensor) -> Parts:
        n_in = weight.shape[1]
        groups = packing.shuffled(n_in, GROUP, 0) if act_order else packing.consecutive(n_in, GROUP)
        return _tensors(packing.gptq(packing.rounded(weight.numpy(), bits, groups, symmetric=True)))

    said = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": act_order, "sym": True}
    return folder(f"GPTQ {bits} bits g{GROUP}{' act-order' if act_order else ''}", "tests", quantize, said)


def _tensors(parts: dict[str, Any]) -> Parts:
    return {f".{name}": torch.from_numpy(np.ascontiguousarray(values)) for name, values in parts.items()}


def bitsandbytes(kind: str, codebook: Codebook) -> Written:
    """Nearest codes of the matrix as one long row, in blocks of 64."""

    def quantize(weight: torch.Tensor) -> Parts:
        blocks = weight.reshape(-1, 64)
        maxima = blocks.abs().amax(1)
        codes = nearest(blocks / maxima[:, None], codebook.values).reshape(-1)
        return {
            ".weight": (codes[::2] << 4 | codes[1::2])[:, None],
            ".weight.absmax": maxima,
            ".weight.quant_map": torch.tensor(codebook.values),
            f".weight.quant_state.bitsandbytes__{kind}": test_bitsandbytes.state(list(weight.shape), quant_type=kind),
        }

    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return folder(f"bitsandbytes {kind}", "torch", quantize, said)


def torchao_int4(weight: torch.Tensor) -> Parts:
    q, scale = test_torchao.rounded(weight, 7, torch.bfloat16)
    codes, scale = q.to(torch.int8).reshape(weight.shape), scale.T.contiguous()
    packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    return test_torchao.named({"qdata": packed, "scale": scale, "zero_point": torch.zeros_like(scale)})


def torchao(name: str, quantize: Callable[[torch.Tensor], Parts], weight: dict[str, Any]) -> Written:
    return folder(name, "tests", quantize, test_torchao.SAID, lambda module: {f"{module}.weight": json.dumps(weight)})


def _folders() -> list[Written]:
    ct, schemes = "compressed-tensors", test_compressed_tensors.SCHEMES
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    nvidia = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    eight = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return [
        plain(torch.float16),
        plain(torch.bfloat16),
        folder(
            f"AWQ g{GROUP}",
            "tests",
            awq,
            {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        ),
        *(gptq(bits, act_order) for bits in (4, 8) for act_order in (False, True)),
        compressed(f"{ct} W8A16 channel", "w8-channel", schemes["w8-channel"][1], "pack-quantized"),
        compressed(f"{ct} W4A16 g64", "w4-group64", schemes["w4-group64"][1], "pack-quantized"),
        compressed(f"{ct} W4A16 g32", "w4-group32", schemes["w4-group32"][1], "pack-quantized"),
        compressed(f"{ct} FP8 channel", "fp8-channel", schemes["fp8-channel"][1], "float-quantized"),
        compressed(f"{ct} MXFP4", "mxfp4", schemes["mxfp4"][1], "mxfp4-pack-quantized"),
        compressed(f"{ct} NVFP4", "nvfp4", schemes["nvfp4"][1], "nvfp4-pack-quantized"),
        folder("fp8 channel", "torch", fp8_channels, fp8),
        folder("fp8 block 128x128", "torch", fp8_blocks, {**fp8, "weight_block_size": [128, 128]}),
        folder("modelopt NVFP4", "torch", nvfp4, nvidia),
        bitsandbytes("nf4", NF4_32),
        bitsandbytes("fp4", FP4_32),
        folder("bitsandbytes int8", "tests", lambda w: test_bitsandbytes.int8(w)[0], eight),
        folder(f"HQQ 4 bits g{GROUP}", "tests", lambda w: test_hqq.hqq(w, 4, GROUP)[0], test_hqq.SAID),
        folder(f"HQQ 8 bits g{GROUP}", "tests", lambda w: test_hqq.hqq(w, 8, GROUP)[0], test_hqq.SAID),
        torchao("torchao int4 g32", torchao_int4, test_torchao.INT4),
        torchao("torchao int8 g32", lambda w: test_torchao.int8(w)[0], test_torchao.INT8),
    ]


WRITTEN: dict[str, Written] = {one.name: one for one in (*map(gguf_file, GGUF), *_folders())}
"""By name."""
