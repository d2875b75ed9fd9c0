"""PyTorch's .bin files: sound ones, broken ones, and pickles that would run code."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.checkpoint.pickled import read_bin
from octavo.quant import dense
from tests.checkpoint.tiny import tiny


def test_single_file(tmp_path: Path) -> None:
    model = tiny("qwen2").to(torch.bfloat16)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert checkpoint.kind(name) == "BF16"
            vector = tensor.dim() == 1
            values = checkpoint.vector(name) if vector else dense(checkpoint.stored(name))
            assert np.array_equal(values, tensor.float().numpy()), name
        assert not checkpoint.stored("lm_head.weight").data.flags.owndata


def test_shards_and_safetensors_first(tmp_path: Path) -> None:
    model = tiny("llama")
    model.config.save_pretrained(tmp_path)
    state = model.state_dict()
    names = sorted(state)
    files = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(names)}
    for file in set(files.values()):
        torch.save({name: state[name] for name in names if files[name] == file}, tmp_path / file)
    index = str({"weight_map": files}).replace("'", '"')
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == set(names)
        assert np.array_equal(checkpoint.vector("model.norm.weight"), np.ones(32, np.float32))
    model.half().save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.kind("lm_head.weight") == "F16"


def test_parts_of_storages_parameters_and_other_types(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float16).reshape(6, 4)
    torch.save(
        {
            "state_dict": {
                "rows": base[2:4],
                "again": base,
                "parameter": torch.nn.Parameter(torch.ones(3)),
                "ids": torch.arange(3),
                "one": torch.zeros(1, 4).T.contiguous().T,
            }
        },
        tmp_path / "m.bin",
    )
    read = read_bin(tmp_path / "m.bin")
    assert read["rows"].shape == (2, 4) and read["rows"].data.view(np.float16).tolist() == list(range(8, 16))
    assert read["again"].data.view(np.float16).tolist() == list(range(24))
    assert (read["parameter"].kind, read["ids"].kind, read["one"].shape) == ("F32", "I64", (1, 4))


def test_transposed_storage_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 3).T}, tmp_path / "m.bin")
    with pytest.raises(CheckpointError, match="'w' is not stored row by row. Save the model again as safetensors"):
        read_bin(tmp_path / "m.bin")


def test_old_format(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "m.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="not in the zip format .* as safetensors"):
        read_bin(tmp_path / "m.bin")


def test_truncated(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"w": torch.ones(1000)}, path)
    path.write_bytes(path.read_bytes()[:-1024])
    with pytest.raises(CheckpointError, match="m.bin is broken or cut off"):
        read_bin(path)


def _archive(path: Path, text: bytes, data: bytes = bytes(64), compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("m/data.pkl", text)
        archive.writestr("m/data/0", data)
    return path


class _Runs:
    """A pickle that makes a folder when it is loaded without care."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.folder),)


def test_pickle_that_runs_code(tmp_path: Path) -> None:
    text = pickle.dumps({"w": _Runs(tmp_path / "made")})
    with pytest.raises(CheckpointError, match=r"holds more than tensors \((posix|nt).mkdir\); it is not loaded"):
        read_bin(_archive(tmp_path / "m.bin", text))
    assert not (tmp_path / "made").exists()


def _pickle(
    *,
    kind: str = "FloatStorage",
    key: str = "0",
    offset: str = "I0\n",
    shape: str = "(I4\nt",
    stride: str = "(I1\nt",
    function: str = "ctorch._utils\n_rebuild_tensor_v2\n",
) -> bytes:
    """{"w": tensor} in the text opcodes, with parts to be replaced."""
    storage = f"(S'storage'\nctorch\n{kind}\nS'{key}'\nS'cpu'\nI4\ntQ"
    return f"(dS'w'\n{function}({storage}{offset}{shape}{stride}I00\nNtRs.".encode()


def test_the_broken_pickles_below_differ_from_a_sound_one(tmp_path: Path) -> None:
    data = np.arange(16, dtype=np.float32).tobytes()
    tensor = read_bin(_archive(tmp_path / "m.bin", _pickle(offset="I2\n"), data))["w"]
    assert tensor.shape == (4,) and tensor.data.view(np.float32).tolist() == [2, 3, 4, 5]


def _torchao(name: str, state: str, arguments: str = "(NN(I4\nI4\ntt") -> bytes:
    """{"w": object of a class of torchao}."""
    made = (
        f"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_wrapper_subclass\nctorchao.dtypes\n{name}\n"
    )
    return f"(dS'w'\n{made}{arguments}{state}tRs.".encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_torchao("AffineQuantizedTensor", "(d"), "'w' is a AffineQuantizedTensor of torchao, which cannot be read"),
        (_torchao("Int8Tensor", "I5\n"), "broken pickle .*a tensor of torchao without attributes or shape"),
        (_torchao("Int8Tensor", "(d", "(NNI4\nt"), "a tensor of torchao without attributes or shape"),
        (_torchao("Int8Tensor", "(d", "N"), "broken pickle"),
        (b"(dS'w'\nctorchao.quantization\nrun\n(S'rm'\ntRs.", "'w' is not a tensor but run"),
        (b"ctorchao\nX\n(dS'a'\nI1\nsb.", "broken pickle"),
        (b"ctorchaos\nX\n.", r"holds more than tensors \(torchaos.X\)"),
        (_pickle(kind="QUInt8Storage"), r"holds more than tensors \(torch.QUInt8Storage\)"),
        (_pickle(function="cbuiltins\neval\n"), r"holds more than tensors \(builtins.eval\)"),
        (_pickle(function="cnumpy.core.multiarray\nscalar\n"), "holds more than tensors"),
        (_pickle(key="9"), "it has no data for the storage"),
        (_pickle(shape="(I17\nt"), "'w' needs 68 bytes from byte 0, but its storage has 64"),
        (_pickle(offset="I13\n"), "'w' needs 16 bytes from byte 52, but its storage has 64"),
        (_pickle(offset="I-1\n"), "'w' has the size -1"),
        (_pickle(shape="(I-4\nt"), "'w' has the size -4"),
        (_pickle(shape="(S'4'\nt"), "'w' has the size '4'"),
        (_pickle(shape="I4\n"), "'w' has no shape"),
        (_pickle(shape="(I2000000000\nI2000000000\nt", stride="(I0\nI0\nt"), "but its storage has 64"),
        (b"(dS'w'\nI5\ns.", "'w' is not a tensor but int"),
        (b"I5\n.", "holds a int, not a dictionary"),
        (b"(dS'w'\n", "broken pickle"),
        (b"", "broken pickle"),
        (b"\x80\x04r\xff\xff\xff\x7f.", "impossible memo index"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "broken pickle"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(N(dS'__code__'\nI1\nstb.", "broken pickle"),
    ],
)
def test_broken_pickles(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_bin(_archive(tmp_path / "m.bin", text))
    assert "m.bin" in str(caught.value)


def test_archives_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        read_bin(_archive(path, _pickle(), compression=zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "hello")
    with pytest.raises(CheckpointError, match="it has 0 data.pkl entries"):
        read_bin(path)
    with zipfile.ZipFile(_archive(path, _pickle()), "a") as archive:
        archive.writestr("m/byteorder", "big")
    with pytest.raises(CheckpointError, match="big-endian"):
        read_bin(path)
