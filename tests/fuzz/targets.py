"""What is fuzzed: a target takes the bytes of files and opens them as start-up would, up to the packing of weights."""

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
from octavo.devices.cpu.device import CpuDevice
from octavo.layers.rope import RopeError
from octavo.models.config import ModelConfigError
from octavo.models.registry import find
from octavo.models.weights import LoadError, fit, load
from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.tokenizer import TokenizerError
from tests.fuzz import mutation
from tests.fuzz.quantized import HIDDEN, LLAMA, SHAPES, VOCABULARY, checkpoints

CLEAR = (CheckpointError, ModelConfigError, LoadError, RopeError, TokenizerError)
"""What may be said of a broken file."""


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


@functools.cache
def device() -> CpuDevice:
    """That packs the weights: kernels must not be led outside of their memory."""
    return CpuDevice(1, "int8")


def look(checkpoint: Checkpoint) -> None:
    """Do what start-up does up to the packing of weights, then read every tensor."""
    architecture = find(checkpoint.config)
    config = architecture.config(checkpoint.config)
    model = architecture.make(config, min(config.max_position_embeddings, 4096))
    ignore = architecture.ignore(config)
    _, problems = fit(model, checkpoint, architecture.names(config), ignore)
    if not problems:
        load(model, checkpoint, architecture.names(config), device(), ignore)
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


def _made_quantized(rng: random.Random) -> bytes:
    """A configuration or tensors that are wrong, or both, of one method or of two."""
    config, _, tensors = rng.choice(checkpoints()).partition(b"\0")
    kind = rng.randrange(4)
    if kind == 3:
        config, _, _ = rng.choice(checkpoints()).partition(b"\0")
    if kind in (0, 2):
        said = json.loads(config)
        said["quantization_config"] = mutation.of_json(said["quantization_config"], rng)
        config = json.dumps(said).encode()
    if kind > 0:
        change = mutation.of_tensors if rng.random() < 0.8 else mutation.of_safetensors
        tensors = change(tensors, rng)
    return config + b"\0" + tensors


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


# -- GGUF in two files: the length of the first, as 4 bytes, before both


def _two_files(first: mutation.Pairs, second: mutation.Pairs) -> tuple[bytes, bytes]:
    """The model cut after its third tensor, with these metadata in the parts."""
    pairs, infos, data = gguf_parts("llama")
    _, _, _, cut = infos[3]
    later = [(name, shape, number, offset - cut) for name, shape, number, offset in infos[3:]]
    return mutation.gguf_file([*pairs, *first], infos[:3], data[:cut]), mutation.gguf_file(second, later, data[cut:])


def _split(number: int) -> mutation.Pairs:
    return [("split.no", "u16", number), ("split.count", "u16", 2), ("split.tensors.count", "i32", len(SHAPES))]


def _joined(first: bytes, second: bytes) -> bytes:
    return len(first).to_bytes(4, "little") + first + second


@functools.cache
def _splits() -> list[bytes]:
    return [_joined(*_two_files(_split(0), _split(1)))]


def _made_split(rng: random.Random) -> bytes:
    parts = [mutation.of_pairs(_split(number), rng) if rng.random() < 0.7 else _split(number) for number in (0, 1)]
    first, second = _two_files(*parts)
    if rng.random() < 0.3:
        second = mutation.of_bytes(second, rng, first)
    return _joined(first, second)


def _run_split(data: bytes, folder: Path) -> None:
    size = int.from_bytes(data[:4], "little")
    names = [folder / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for name, content in zip(names, (data[4 : 4 + size], data[4 + size :]), strict=True):
        name.write_bytes(content)
    with open_checkpoint(names[0]) as checkpoint:
        look(checkpoint)


# -- .bin


@functools.cache
def _bins() -> list[bytes]:
    whole = {f"{name}.weight": torch.ones(shape, dtype=torch.float16) for name, shape in SHAPES.items()}
    small = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.nn.Parameter(torch.ones(2))}
    out = []
    for content in (whole, small, {"state_dict": {}}):
        buffer = io.BytesIO()
        torch.save(content, buffer)
        out.append(buffer.getvalue())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}." + bytes(100_000))
    return [*out, buffer.getvalue()]


def _made_bin(rng: random.Random) -> bytes:
    """An archive that is right, with another pickle."""
    with zipfile.ZipFile(io.BytesIO(_bins()[rng.randrange(2)])) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            changed = mutation.of_pickle(content, rng) if name.endswith("data.pkl") else content
            archive.writestr(name, changed)
    return buffer.getvalue()


def _run_bin(data: bytes, folder: Path) -> None:
    _folder(folder, json.dumps(LLAMA).encode(), "pytorch_model.bin", data)


TARGETS = {
    "safetensors": Target(_safetensors, _run_safetensors, _made_safetensors),
    "gguf": Target(_ggufs, _run_gguf, _made_gguf),
    "quantized": Target(checkpoints, _run_quantized, _made_quantized),
    "gguf-parts": Target(_splits, _run_split, _made_split),
    "bin": Target(_bins, _run_bin, _made_bin),
    "config": Target(_configs, _run_config, _made_config),
}
