"""Safetensors files, sound and broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from octavo.checkpoint.errors import CheckpointError
from octavo.checkpoint.safetensors import read_safetensors


def _write(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def _entry(start: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written = {
        "a": rng.standard_normal((3, 5), np.float32),
        "b": rng.standard_normal(7).astype(np.float16),
        "c": rng.standard_normal((2, 4)).astype(ml_dtypes.bfloat16),
        "ids": np.arange(6, dtype=np.int64),
    }
    safetensors.numpy.save_file(written, tmp_path / "x.safetensors", metadata={"format": "pt"})
    read = read_safetensors(tmp_path / "x.safetensors")
    assert {name: tensor.kind for name, tensor in read.items()} == {"a": "F32", "b": "F16", "c": "BF16", "ids": "I64"}
    for name, values in written.items():
        assert read[name].shape == values.shape
        assert read[name].data.tobytes() == values.tobytes()
        assert not read[name].data.flags.owndata and not read[name].data.flags.writeable


SOUND = {"a": _entry(0, 8, [2]), "b": _entry(8, 16, [2, 1])}


def test_the_broken_files_below_differ_from_a_sound_one(tmp_path: Path) -> None:
    assert set(read_safetensors(_write(tmp_path / "x", SOUND, bytes(16)))) == {"a", "b"}


@pytest.mark.parametrize(
    ("header", "data", "length", "message"),
    [
        (SOUND, bytes(15), None, "tensor 'b' ends at byte 16 of the data, which has 15 bytes"),
        (SOUND, bytes(17), None, "1 bytes that belong to no tensor"),
        (SOUND, bytes(16), 1 << 62, "announces a header of 4,611,686,018,427,387,904 bytes"),
        (SOUND, bytes(16), 10_000, "shorter than its header"),
        (b"{", b"", None, "its header is not JSON"),
        (b"[" * 100_000, b"", None, "its header is not JSON"),
        (b'{"\xff": 1}', b"", None, "its header is not JSON"),
        (b"[]", b"", None, "not a JSON object"),
        (b'{"a": %s, "a": %s}' % ((json.dumps(SOUND["a"]).encode(),) * 2), bytes(8), None, "has 'a' twice"),
        ({"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, bytes(12), None, "tensors 'a' and 'b' overlap"),
        ({"a": _entry(0, 8, [3])}, bytes(8), None, r"type F32 and shape \[3\] does not fit its offsets \[0, 8\)"),
        ({"a": _entry(0, 8, [-2])}, bytes(8), None, "tensor 'a' has the size -2"),
        ({"a": _entry(0, 8, [2.0])}, bytes(8), None, "tensor 'a' has the size 2.0"),
        ({"a": _entry(0, 8, [True, 2])}, bytes(8), None, "tensor 'a' has the size True"),
        ({"a": _entry(0, 8, [1 << 40, 1 << 40])}, bytes(8), None, "does not fit its offsets"),
        ({"a": _entry(8, 0, [2])}, bytes(8), None, "does not fit its offsets"),
        ({"a": _entry(0, 8, [2], "F31")}, bytes(8), None, "tensor 'a' has the type 'F31'; known are F64"),
        ({"a": {"dtype": "F32"}}, b"", None, "the entry of tensor 'a' is incomplete"),
        ({"a": 5}, b"", None, "the entry of tensor 'a' is incomplete"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, b"", None, "tensor 'a' is incomplete"),
    ],
)
def test_broken_files_name_file_and_cause(
    tmp_path: Path, header: Any, data: bytes, length: int | None, message: str
) -> None:
    path = _write(tmp_path / "model.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"abc", "shorter than its header"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "Git LFS pointer"),
    ],
)
def test_files_that_are_something_else(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "m").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_safetensors(tmp_path / "m")


def test_absent_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        read_safetensors(tmp_path / "m")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_safetensors(tmp_path)


@pytest.mark.parametrize("seed", range(3))
def test_flipped_bytes_never_raise_anything_else(tmp_path: Path, seed: int) -> None:
    """A thousand damaged headers: each is read as it stands or refused, and no view leaves the file."""
    rng = np.random.default_rng(seed)
    path = tmp_path / "m"
    sound = bytearray(_write(path, SOUND, bytes(16)).read_bytes())
    refused = 0
    for _ in range(333):
        broken = bytearray(sound)
        for at in rng.integers(0, len(sound) - 16, 2):
            broken[at] = rng.integers(0, 256)
        path.write_bytes(broken)
        try:
            tensors = read_safetensors(path)
        except CheckpointError:
            refused += 1
        else:
            assert all(tensor.data.nbytes <= 16 for tensor in tensors.values())
    assert refused > 100
