"""Files that are broken on purpose end in a clear error, quickly and in little memory.

The random part is a short run of what scripts/fuzz does for longer; each finding of a long run has a test of its own.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.checkpoint.safetensors import read_safetensors
from octavo.models.registry import find
from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.tokenizer import TokenizerError
from tests.fuzz import mutation
from tests.fuzz.targets import CLEAR, LLAMA, TARGETS, charsmap, gguf_parts

ROUNDS = 250


@pytest.mark.parametrize("name", TARGETS)
def test_random_changes(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    rng = random.Random(1)
    corpus = target.corpus()
    sound = corpus if name == "quantized" else corpus[:1]
    for data in sound:
        target.run(data, tmp_path)
    for i in range(ROUNDS):
        data = target.mutated(corpus[i % len(corpus)], rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                target.run(data, tmp_path)
        except CLEAR as error:
            assert len(str(error)) > 20


def header(content: Any, data: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(shape: Any, start: Any = 0, end: Any = 0, dtype: Any = "F32") -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        (1 << 62).to_bytes(8, "little") + b"{}",
        header(b"[" * 100_000),
        header(tensor([2**63, 2**63])),
        header(tensor([2**39, 2**39, 0])),
        header(tensor([2**41])),
        header(tensor([1] * 1000)),
        header(tensor([float("nan")])),
        header(tensor([2.0], 0, 8), bytes(8)),
        header(tensor([True], 0, 4), bytes(4)),
        header(tensor([-1])),
        header(tensor("12", 0, 8), bytes(8)),
        header(tensor([1], -4, 0)),
        header(tensor([1], 0, 2**70)),
        header(tensor([1], float("inf"), 4)),
        header(tensor([1], 0, 4, {"dtype": "F32"}), bytes(4)),
        header({"t": None}),
        header(b'{"t": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "t": 1}'),
    ],
)
def test_headers_of_safetensors(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="model.safetensors"):
        read_safetensors(path)


def test_a_name_that_comes_twice_among_many_is_found_at_once(tmp_path: Path) -> None:
    entry = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    names = [*(f"t{i}" for i in range(100_000)), "t99999"]
    (tmp_path / "m").write_bytes(header(("{" + ", ".join(f'"{n}": {entry}' for n in names) + "}").encode()))
    began = time.monotonic()
    with pytest.raises(CheckpointError, match="has 't99999' twice"):
        read_safetensors(tmp_path / "m")
    assert time.monotonic() - began < 5


def pairs_with(key: str, kind: str, value: Any) -> bytes:
    pairs, infos, data = gguf_parts("llama")
    return mutation.gguf_file([*(p for p in pairs if p[0] != key), (key, kind, value)], infos, data)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("split.count", "u16", [1, 2]),
        ("split.count", "text", "2"),
        ("split.count", "u64", 2**64 - 1),
        ("general.alignment", "u32", 3),
        ("general.alignment", "u32", [32]),
        ("llama.rope.scaling.factor", "f32", [1.0, 2.0]),
        ("llama.rope.scaling.type", "u8", [1, 2]),
        ("llama.rope.scaling.original_context_length", "u8", [1, 2]),
        ("llama.block_count", "u64", 2**64 - 1),
        ("llama.attention.head_count", "u32", 0),
        ("llama.attention.key_length", "u32", 2**31),
        ("llama.attention.head_count_kv", "i32", -1),
        ("llama.expert_count", "u32", 2**32 - 1),
        ("llama.rope.dimension_count", "u32", 2**31),
        ("general.architecture", "u32", 1),
    ],
)
def test_metadata_of_gguf(key: str, kind: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(pairs_with(key, kind, value))
    with pytest.raises(CLEAR):
        checkpoint = open_checkpoint(path)
        architecture = find(checkpoint.config)
        architecture.make(architecture.config(checkpoint.config), 256)


@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("tokens", "u32", list(range(48))),
        ("tokens", "u32", 1),
        ("token_type", "f32", [1.5] * 48),
        ("token_type", "text", ["x"] * 48),
        ("scores", "text", ["x"] * 48),
        ("scores", "f32", 1.0),
        ("bos_token_id", "text", "x"),
        ("bos_token_id", "u32", [1, 2]),
        ("bos_token_id", "u32", 48),
        ("add_bos_token", "u32", [1, 2]),
        ("model", "u32", 1),
    ],
)
def test_tokenizers_of_gguf(key: str, kind: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(pairs_with(f"tokenizer.ggml.{key}", kind, value))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.metadata is not None
        with pytest.raises(TokenizerError):
            from_gguf(checkpoint.metadata)


def test_rules_of_normalisation() -> None:
    pieces = ["<pad>", "</s>", "<unk>", "▁", "b", "c"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.zeros(6, np.float32),
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(charsmap(), np.uint8),
    }
    assert from_gguf(metadata).encode("a", add_special_tokens=False) == [3, 4, 5]
    for broken, why in (
        (bytes(4), "cut off"),
        (charsmap()[:100], "cut off"),
        (charsmap()[:-1], "cut off"),
        (charsmap({0: 768 << 10}), "beyond their end"),
        (charsmap({0: (1 << 21) << 10}), "beyond their end"),
        (charsmap({512: 1 << 31 | 3}), "beyond their end"),
        (charsmap({512: 1 << 31 | 1}, "é\0".encode()), "middle of a character"),
    ):
        with pytest.raises(TokenizerError, match=why):
            from_gguf({**metadata, "tokenizer.ggml.precompiled_charsmap": np.frombuffer(broken, np.uint8)})


def test_counts_and_lengths_of_gguf_beyond_the_file(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    huge = struct.pack("<Q", 2**63)
    for content in (
        b"GGUF" + struct.pack("<I", 3) + huge + huge,
        b"GGUF" + struct.pack("<IQQ", 3, 2**40, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + huge + b"key",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 9, 1) * 1000,
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="hostile.gguf"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
        {"num_hidden_layers": float("nan")},
        {"num_hidden_layers": float("inf")},
        {"num_key_value_heads": 0},
        {"num_local_experts": 10**9},
        {"rope_parameters": [1]},
        {"rope_parameters": {"rope_type": "yarn", "factor": "x"}},
        {"rope_parameters": {"rope_type": "linear", "factor": None}},
        {"layer_types": 7},
        {"hidden_act": ["silu"]},
        {"rms_norm_eps": "small"},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": 5},
    ],
)
def test_configurations(changes: dict[str, Any]) -> None:
    raw = json.loads(json.dumps({**LLAMA, **changes}))
    with pytest.raises(CLEAR):
        architecture = find(raw)
        architecture.make(architecture.config(raw), 256)


@pytest.mark.parametrize(
    "said",
    [
        *(5, "gptq", [], [1], {"quant_method": ["gptq"]}, {"quant_method": {}}, {"quant_method": None}),
        {"quant_method": "modelopt", "quantization": [1]},
        {"quant_method": "gptq", "bits": "4", "group_size": 32},
        {"quant_method": "awq", "bits": 4, "group_size": 0},
    ],
)
def test_quantization_configs(said: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": said}))
    (tmp_path / "model.safetensors").write_bytes(save({"t": np.zeros(1, np.float32)}))
    if said == []:
        open_checkpoint(tmp_path).close()
        return
    with pytest.raises(CheckpointError, match="quantization_config"):
        open_checkpoint(tmp_path)


def folder_of(path: Path, config: dict[str, Any], tensors: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(save(tensors))
    return path


PLAIN = {"m.weight": np.zeros((4, 32), np.float32)}
INTEGERS = {"num_bits": 8, "type": "int", "strategy": "channel"}
PACKED = {
    "m.weight_packed": np.zeros((4, 8), np.int32),
    "m.weight_scale": np.ones((4, 1), np.float32),
    "m.weight_shape": np.array([4, 32]),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m.weight": np.zeros((4, 32), np.float32)}, "it has both weight and weight_packed"),
        ({"m.weight_shape": np.array([8, 32])}, r"weight_shape is I64 \[8, 32\] for 4 rows"),
        ({"m.weight_shape": np.array([4, 32, 4, 32])}, r"weight_shape is I64 \[4, 32, 4, 32\] for 4 rows"),
        ({"m.weight_shape": np.array([4.0, 32.0])}, r"weight_shape is F64 \[2\] for 4 rows"),
        ({"m.weight_scale": np.ones((4, 1), np.int64)}, "weight_scale has the type I64"),
    ],
)
def test_tensors_that_contradict_each_other(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    said = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": INTEGERS}}}
    config = {**LLAMA, "quantization_config": said}
    open_checkpoint(folder_of(tmp_path, config, PACKED)).close()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder_of(tmp_path, config, PACKED | changes))


def test_a_matrix_is_there_as_it_is_or_quantized_not_both(tmp_path: Path) -> None:
    tensors = {
        "m.qweight": np.zeros((32, 4), np.int32),
        "m.qzeros": np.zeros((1, 4), np.int32),
        "m.scales": np.ones((1, 32), np.float16),
    }
    config = {**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    open_checkpoint(folder_of(tmp_path, config, tensors)).close()
    with pytest.raises(CheckpointError, match="'m.weight' is there twice, as it is and as awq keeps it"):
        open_checkpoint(folder_of(tmp_path, config, tensors | PLAIN))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """Reading a pipe would wait for ever, and /dev/zero has no end."""
    folder_of(tmp_path, LLAMA, PLAIN)
    (tmp_path / "tokenizer.json").write_text("{}")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (tmp_path / name).rename(tmp_path / "kept")
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is a device, a pipe"):
            open_checkpoint(tmp_path)
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        with pytest.raises(CheckpointError, match=f"{name} cannot be read: it is a device, a pipe"):
            open_checkpoint(tmp_path)
        (tmp_path / name).unlink()
        (tmp_path / "kept").rename(tmp_path / name)
    open_checkpoint(tmp_path).close()


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a\0b", "a" * 5000, "\ud800", "config.json"])
def test_files_that_an_index_names(name: str, tmp_path: Path) -> None:
    folder_of(tmp_path, LLAMA, PLAIN)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"m.weight": "one.safetensors"}}))
    open_checkpoint(tmp_path).close()
    index.write_text(json.dumps({"weight_map": {"m.weight": "one.safetensors", "x": name}}))
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path)
    assert len(str(raised.value).encode()) < 1000


def test_shards_may_be_links_and_share_a_module(tmp_path: Path) -> None:
    """As the hub's library lays out its cache."""
    said = {"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["Linear"], "weights": INTEGERS}}}
    (tmp_path / "model").mkdir()
    where = {}
    for i, (name, values) in enumerate(PACKED.items()):
        (tmp_path / f"{i}").write_bytes(save({name: values}))
        (tmp_path / "model" / f"{i}.safetensors").symlink_to(f"../{i}")
        where[name] = f"{i}.safetensors"
    (tmp_path / "model" / "config.json").write_text(json.dumps({**LLAMA, "quantization_config": said}))
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "model").chmod(0o555)
    with open_checkpoint(tmp_path / "model") as checkpoint:
        assert checkpoint.shape("m.weight") == (4, 32) and checkpoint.vector("m.weight").tolist() == [-128.0] * 128


class _Evil:
    def __init__(self, reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize(
    "content",
    [
        lambda mark: pickle.dumps(_Evil((open, (mark, "w")))),
        lambda mark: pickle.dumps({"t": _Evil((eval, (f"open({mark!r}, 'w')",)))}),
        lambda mark: b"cos\nsystem\n(S'touch " + mark.encode() + b"'\ntR.",
        lambda mark: b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x05touch\x85R.",
        lambda mark: b"\x80\x02" + b"(" * 1_000_000 + b".",
        lambda mark: b"\x80\x02]" + b"2" * 50 + b"a" * 49 + b".",
        lambda mark: b"r\xff\xff\xff\x7f.",
        lambda mark: b"\x80\x04\x95" + b"\xff" * 8 + b".",
        lambda mark: b"\x80\x02\x8a\xff" + b"\xff" * 255 + b".",
        lambda mark: b"",
    ],
)
def test_pickles(content: Callable[[str], bytes], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", content(str(mark)))
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        open_checkpoint(tmp_path)
    assert not mark.exists(), "code of a pickle was run"


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 << 20))
    with pytest.raises(CheckpointError, match="is compressed or encrypted"):
        open_checkpoint(tmp_path)
