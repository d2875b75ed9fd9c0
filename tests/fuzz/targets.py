"""What is fuzzed: a target takes the bytes of a file and opens it as start-up would, up to the reading of weights."""

from __future__ import annotations

import functools
import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save

from octavo.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from octavo.layers.rope import RopeError
from octavo.models.config import ModelConfigError
from octavo.models.registry import find
from octavo.models.weights import LoadError, fit
from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.tokenizer import TokenizerError
from tests.fuzz import mutation

CLEAR = (CheckpointError, ModelConfigError, LoadError, RopeError, TokenizerError)
"""What may be said of a broken file."""

HIDDEN, VOCABULARY = 64, 48
LLAMA = {
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


class Target(NamedTuple):
    corpus: Callable[[], list[bytes]]
    run: Callable[[bytes, Path], None]
    """(the bytes, a folder that may be written to). Raises one of `CLEAR`, or what is a finding."""
    made: Callable[[random.Random], bytes] | None = None
    """A file whose form is right and whose values are not."""

    def mutated(self, data: bytes, rng: random.Random) -> bytes:
        """Another file, from `data` or from nothing."""
        if self.made is not None and rng.random() < 0.5:
            return self.made(rng)
        return mutation.of_bytes(data, rng, rng.choice(self.corpus()))


def look(checkpoint: Checkpoint) -> None:
    """Do what start-up does before weights are packed, then read every tensor."""
    architecture = find(checkpoint.config)
    config = architecture.config(checkpoint.config)
    model = architecture.make(config, min(config.max_position_embeddings, 4096))
    fit(model, checkpoint, architecture.names(config), architecture.ignore(config))
    for name in sorted(checkpoint.names()):
        try:
            checkpoint.vector(name)
            checkpoint.stored(name)
        except CheckpointError:
            pass  # a vector, or a type that is no format


def _folder(folder: Path, config: bytes, name: str, content: bytes) -> None:
    for old in folder.iterdir():
        old.unlink()
    (folder / "config.json").write_bytes(config)
    (folder / name).write_bytes(content)
    with open_checkpoint(folder) as checkpoint:
        look(checkpoint)


# -- safetensors


def _arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {f"{name}.weight": rng.standard_normal(shape).astype(np.float16) for name, shape in SHAPES.items()}


@functools.cache
def _safetensors() -> list[bytes]:
    small = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(0, np.uint8), "c": np.full((), 3, np.int64)}
    return [save(_arrays()), save(small, {"format": "pt"}), save({})]


def _made_safetensors(rng: random.Random) -> bytes:
    return mutation.of_safetensors(rng.choice(_safetensors()), rng)


def _run_safetensors(data: bytes, folder: Path) -> None:
    _folder(folder, json.dumps(LLAMA).encode(), "model.safetensors", data)


# -- config.json


@functools.cache
def _configs() -> list[bytes]:
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "layer_types": ["sliding_attention"]}
    mixtral = {**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1}
    wrapped = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": LLAMA}
    return [json.dumps(config).encode() for config in (LLAMA, gemma, mixtral, wrapped)]


def _made_config(rng: random.Random) -> bytes:
    return json.dumps(mutation.of_json(json.loads(rng.choice(_configs())), rng)).encode()


def _run_config(data: bytes, folder: Path) -> None:
    _folder(folder, data, "model.safetensors", save(_arrays()))


# -- quantized: a config, a zero byte, a safetensors file


@functools.cache
def _quantized() -> list[bytes]:
    rng = np.random.default_rng(0)
    rest = {name: value for name, value in _arrays().items() if "_proj" not in name}

    def of(name: str, parts: dict[str, Any]) -> dict[str, Any]:
        return {f"{name}.{ending}": value for ending, value in parts.items()}

    def bits(*shape: int) -> Any:
        return rng.integers(-(2**31), 2**31, shape, np.int32)

    def scales(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float16)

    def all_of(make: Callable[[int, int], dict[str, Any]]) -> dict[str, Any]:
        out = dict(rest)
        for name, shape in SHAPES.items():
            if "_proj" in name:
                out.update(of(name, make(shape[0], shape[1])))
        return out

    gptq = all_of(
        lambda n, k: {
            "qweight": bits(k // 8, n),
            "qzeros": bits(k // 32, n // 8),
            "scales": scales(k // 32, n),
            "g_idx": np.arange(k, dtype=np.int32) // 32,
        }
    )
    awq = all_of(
        lambda n, k: {"qweight": bits(k, n // 8), "qzeros": bits(k // 32, n // 8), "scales": scales(k // 32, n)}
    )
    fp8 = all_of(
        lambda n, k: {
            "weight": rng.integers(0, 256, (n, k), np.uint8),
            "weight_scale_inv": np.ones((-(-n // 32), -(-k // 32)), np.float32),
        }
    )
    mxfp4 = {
        **_arrays(),
        "e_blocks": rng.integers(0, 256, (2, 4, 3, 16), np.uint8),
        "e_scales": rng.integers(0, 256, (2, 4, 3), np.uint8),
    }
    said: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}, gptq),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq),
        ({"quant_method": "fp8", "weight_block_size": [32, 32], "fmt": "e4m3"}, fp8),
        ({"quant_method": "mxfp4"}, mxfp4),
    ]
    return [json.dumps({**LLAMA, "quantization_config": q}).encode() + b"\0" + _saved(t) for q, t in said]


def _saved(tensors: dict[str, Any]) -> bytes:
    """In a file; what ends in .weight and is bytes becomes floats of 8 bits, which numpy has no type for."""
    data = save(tensors)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for name, entry in header.items():
        if name.endswith(".weight") and entry["dtype"] == "U8":
            entry["dtype"] = "F8_E4M3"
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def _made_quantized(rng: random.Random) -> bytes:
    config, _, tensors = rng.choice(_quantized()).partition(b"\0")
    if rng.random() < 0.5:
        said = json.loads(config)
        said["quantization_config"] = mutation.of_json(said["quantization_config"], rng)
        return json.dumps(said).encode() + b"\0" + tensors
    return config + b"\0" + mutation.of_safetensors(tensors, rng)


def _run_quantized(data: bytes, folder: Path) -> None:
    config, _, tensors = data.partition(b"\0")
    _folder(folder, config, "model.safetensors", tensors)


# -- GGUF


OWN_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
F32, Q4_0 = 0, 2


def charsmap(changes: dict[int, int] | None = None, texts: bytes = b"bc\0") -> bytes:
    """SentencePiece's rules of normalisation with the one that "a" becomes "bc": words of an offset (shifted by 10),
    the mark of a leaf (bit 8) and a byte. `changes`: other words."""
    array = np.zeros(768, np.uint32)
    array[0] = 256 << 10
    array[256 ^ ord("a")] = (512 ^ 256 ^ ord("a")) << 10 | 1 << 8 | ord("a")
    array[512] = 1 << 31
    for at, word in (changes or {}).items():
        array[at] = word
    return array.nbytes.to_bytes(4, "little") + array.tobytes() + texts


@functools.cache
def gguf_parts(kind: str) -> tuple[mutation.Pairs, mutation.Infos, bytes]:
    """A Llama with a tokenizer of this kind, matrices in Q4_0."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOP", "ab", "bc", "<unk>", "<pad>", "<s>", "</s>"]
    scores = [float(-i) for i in range(VOCABULARY)]
    more: dict[str, mutation.Pairs] = {
        "gpt2": [("pre", "text", "llama-bpe"), ("merges", "text", ["a b", "b c"])],
        "llama": [("scores", "f32", scores)],
        "t5": [("scores", "f32", scores), ("precompiled_charsmap", "u8", list(charsmap()))],
        "bert": [("token_type_count", "u32", 2)],
    }
    tokenizer: mutation.Pairs = [
        ("model", "text", kind),
        ("tokens", "text", pieces),
        ("token_type", "i32", [1] * 44 + [2, 3, 3, 3]),
        ("bos_token_id", "u32", 46),
        ("eos_token_id", "u32", 47),
        *more[kind],
    ]
    pairs: mutation.Pairs = [
        ("general.architecture", "text", "llama"),
        ("llama.block_count", "u32", 1),
        ("llama.context_length", "u32", 256),
        ("llama.embedding_length", "u32", HIDDEN),
        ("llama.feed_forward_length", "u32", 96),
        ("llama.attention.head_count", "u32", 4),
        ("llama.attention.head_count_kv", "u32", 2),
        ("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        ("llama.rope.freq_base", "f32", 10000.0),
        ("llama.rope.scaling.type", "text", "linear"),
        ("llama.rope.scaling.factor", "f32", 2.0),
        ("tokenizer.chat_template", "text", "{{ messages }}"),
        *((f"tokenizer.ggml.{key}", of, value) for key, of, value in tokenizer),
    ]
    infos: mutation.Infos = []
    data = b""
    for name, shape in SHAPES.items():
        own = OWN_NAMES.get(name) or f"blk.0.{OWN_NAMES[name.rpartition('.')[2]]}"
        quantized = len(shape) == 2 and "embed" not in name
        size = shape[0] * shape[1] // 32 * 18 if quantized else 4 * int(np.prod(shape))
        infos.append((f"{own}.weight", shape, Q4_0 if quantized else F32, len(data)))
        data += bytes(-(-size // 32) * 32)
    return pairs, infos, data


TOKENIZERS = ("llama", "gpt2", "t5", "bert")


@functools.cache
def _ggufs() -> list[bytes]:
    return [mutation.gguf_file(*gguf_parts(kind)) for kind in TOKENIZERS]


def _made_gguf(rng: random.Random) -> bytes:
    return mutation.of_gguf(*gguf_parts(rng.choice(TOKENIZERS)), rng)


def _run_gguf(data: bytes, folder: Path) -> None:
    path = folder / "fuzzed.gguf"
    path.write_bytes(data)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata is not None
        try:
            tokenizer = from_gguf(checkpoint.metadata)
        except TokenizerError:
            pass
        else:
            tokenizer.encode("a bc")
        look(checkpoint)


# -- .bin


@functools.cache
def _bins() -> list[bytes]:
    out = []
    for content in ({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, {"state_dict": {}}):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        out.append(buffer.getvalue())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}." + bytes(100_000))
    return [*out, buffer.getvalue()]


def _run_bin(data: bytes, folder: Path) -> None:
    _folder(folder, json.dumps(LLAMA).encode(), "pytorch_model.bin", data)


TARGETS = {
    "safetensors": Target(_safetensors, _run_safetensors, _made_safetensors),
    "gguf": Target(_ggufs, _run_gguf, _made_gguf),
    "quantized": Target(_quantized, _run_quantized, _made_quantized),
    "bin": Target(_bins, _run_bin),
    "config": Target(_configs, _run_config, _made_config),
}
