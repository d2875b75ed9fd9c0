"""The models: two real ones, and the shapes of two larger ones with random weights.

The files of shapes are for measuring speed alone: all layers have the same matrices, drawn once and quantized by ggml,
and SmolLM2's tokenizer filled up to the shape's vocabulary. What is read and multiplied is what the real model has.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.formats import files, ggml
from octavo.config import cache_dir
from tests import realmodels
from tests.quant import packing


class Model(NamedTuple):
    name: str
    title: str
    """What its weights are."""
    path: Callable[[], Path]
    """Makes it first where it is not there."""
    dtype: str = "float32"
    """For engines that must be told."""
    floats: Callable[[], Path] | None = None
    """The folder of the same values in float32, which parity is measured against."""


class Shape(NamedTuple):
    """Sizes of a model as its config.json has them."""

    arch: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    theta: float
    bias: bool
    """Of queries, keys and values."""

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(n_out, n_in) of a layer's matrices, by GGUF's names."""
        kv = self.kv_heads * self.head
        return {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.inner, self.hidden),
            "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 151936, 1e6, True),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 128256, 5e5, False),
}
SMOLLM2 = Shape("llama", 576, 1536, 30, 9, 3, 49152, 1e5, False)
FILES = ("Q4_K", "Q8_0", "Q4_0")
GROUP = 128
"""Inputs that have one scale in the folders of 4-bit integers."""
FOLDER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def drawn(n_out: int, n_in: int) -> Any:
    """float32 [n_out, n_in], the same for the same size."""
    rng = np.random.default_rng([n_out, n_in])
    return rng.standard_normal((n_out, n_in), np.float32) * np.float32(0.02)


def made(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, written first where it is not there, as a whole or not at all."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=target.parent))
        try:
            write(fresh / target.name)
            (fresh / target.name).rename(target)
        finally:
            shutil.rmtree(fresh)
    return target


def write_gguf(shape: Shape, kind: str, path: Path) -> None:
    """The head is the embeddings' table, in the type that llama.cpp gives to it beside `kind`."""
    quantize = ggml.Quantizer(cache_dir() / "formats")
    writer = gguf.GGUFWriter(path, shape.arch)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape.theta)
    if shape.arch == "llama":
        writer.add_rope_dimension_count(shape.head)
        writer.add_vocab_size(shape.vocab)
    _tokenizer(writer, shape.vocab)

    def matrix(size: tuple[int, int], wanted: str) -> tuple[Any, gguf.GGMLQuantizationType]:
        name = ggml.fitting(wanted, size[1])
        return quantize(drawn(*size), name), gguf.GGMLQuantizationType[name]

    data, said = matrix((shape.vocab, shape.hidden), "Q8_0" if kind == "Q8_0" else "Q6_K")
    writer.add_tensor("token_embd.weight", data, raw_dtype=said)
    ones = np.ones(shape.hidden, np.float32)
    writer.add_tensor("output_norm.weight", ones)
    matrices = {name: matrix(size, kind) for name, size in shape.matrices().items()}
    for layer in range(shape.layers):
        for name, (data, said) in matrices.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=said)
            if shape.bias and name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.{layer}.{name}.bias", np.zeros(len(data), np.float32))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """SmolLM2's, with tokens that no text has up to `vocab`."""
    source = gguf.GGUFReader(realmodels.smollm2_gguf())
    for field in source.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value = field.contents()
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        if field.name == "tokenizer.ggml.tokens":
            value = [*value, *(f"<unused {i}>" for i in range(len(value), vocab))]
        elif field.name == "tokenizer.ggml.token_type":
            value = [*value, *[int(gguf.TokenType.UNUSED)] * (vocab - len(value))]
        writer.add_key_value(field.name, value, field.types[0], inner)


def write_folder(shape: Shape, path: Path) -> None:
    """Matrices of 4-bit integers as GPTQ's files have them, embeddings in float16."""
    source = realmodels.smollm2_hf()
    shutil.copytree(source, path, ignore=shutil.ignore_patterns("model.safetensors"))
    said = {
        "architectures": ["Qwen2ForCausalLM" if shape.arch == "qwen2" else "LlamaForCausalLM"],
        "model_type": shape.arch,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "rope_theta": shape.theta,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "dtype": "float16",
        "quantization_config": {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "desc_act": False,
            "sym": True,
        },
    }
    (path / "config.json").write_text(json.dumps(said))
    save_file(dict(_tensors(shape)), path / "model.safetensors", {"format": "pt"})


def _tensors(shape: Shape) -> Iterator[tuple[str, torch.Tensor]]:
    ones = torch.ones(shape.hidden, dtype=torch.float16)
    yield "model.embed_tokens.weight", torch.from_numpy(drawn(shape.vocab, shape.hidden)).half()
    yield "model.norm.weight", ones.clone()
    quantized = {
        name: packing.gptq(packing.rounded(drawn(*size), 4, packing.consecutive(size[1], GROUP), symmetric=True))
        for name, size in shape.matrices().items()
    }
    for layer in range(shape.layers):
        for name, parts in quantized.items():
            module = f"model.layers.{layer}.{FOLDER_NAMES[name]}"
            for ending, values in parts.items():
                yield f"{module}.{ending}", torch.from_numpy(np.ascontiguousarray(values)).clone()
            if shape.bias and name in ("attn_q", "attn_k", "attn_v"):
                yield f"{module}.bias", torch.zeros(shape.matrices()[name][0], dtype=torch.float16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", ones.clone()


def _bfloat16() -> Path:
    return files.path_of(files.WRITTEN["folder bfloat16"], cache_dir() / "formats")


def _shapes() -> Iterator[Model]:
    for name, shape in SHAPES.items():
        folder = cache_dir() / "peers" / "shapes"
        for kind in FILES:
            target = folder / f"{name}-{kind}.gguf"
            yield Model(f"{name} {kind}", kind, partial(made, target, partial(write_gguf, shape, kind)))
        target = folder / f"{name}-int4"
        yield Model(f"{name} int4", f"int4, groups of {GROUP}", partial(made, target, partial(write_folder, shape)))


MODELS: dict[str, Model] = {
    one.name: one
    for one in (
        Model("smollm2", "Q4_1", lambda: realmodels.smollm2_gguf(), floats=lambda: realmodels.smollm2_hf()),
        Model("smollm2 float32", "float32", lambda: realmodels.smollm2_hf(), floats=lambda: realmodels.smollm2_hf()),
        Model("smollm2 bfloat16", "bfloat16", _bfloat16, "bfloat16", lambda: realmodels.smollm2_hf()),
        Model("gemma3", '"Q4_K_M"', lambda: realmodels.gemma_gguf(), floats=lambda: realmodels.gemma_hf()),
        *_shapes(),
    )
}
"""By name."""


def parameters(model: str, head: bool) -> int:
    """Weights that a token is multiplied with: those of the layers' matrices and, where wanted, of the head."""
    name = model.split(" ")[0]
    shape = SHAPES.get(name, SMOLLM2)
    layer = sum(n_out * n_in for n_out, n_in in shape.matrices().values())
    return shape.layers * layer + head * shape.vocab * shape.hidden
