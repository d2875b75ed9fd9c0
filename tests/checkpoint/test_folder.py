"""Hugging Face folders as transformers writes them, and broken ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from octavo.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from octavo.quant import dense
from tests.checkpoint.tiny import tiny


def _values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    return checkpoint.vector(name) if len(checkpoint.shape(name)) == 1 else dense(checkpoint.stored(name))


def _check_equal(checkpoint: Checkpoint, state: dict[str, torch.Tensor]) -> None:
    assert checkpoint.names() == set(state)
    for name, tensor in state.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert np.array_equal(_values(checkpoint, name), tensor.float().numpy()), name


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sharded_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    tiny("llama").save_pretrained(folder, max_shard_size="16KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def llama(llama_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(llama_folder, tmp_path / "model"))


@pytest.fixture
def sharded(sharded_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded_folder, tmp_path / "model"))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
def test_every_architecture(tmp_path: Path, model_type: str) -> None:
    model = tiny(model_type)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.style == "hf" and checkpoint.metadata is None and checkpoint.path == tmp_path
        assert checkpoint.config["architectures"] == [type(model).__name__]
        assert checkpoint.config["hidden_size"] == 32
        _check_equal(checkpoint, model.state_dict())


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float16, "F16"), (torch.bfloat16, "BF16"), (torch.float32, "F32")])
def test_types(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    model = tiny("llama").to(dtype)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert {checkpoint.kind(name) for name in checkpoint.names()} == {kind}
        assert checkpoint.total_bytes == sum(t.nbytes for t in model.state_dict().values())
        assert sum(map(checkpoint.bytes_of, checkpoint.names())) == checkpoint.total_bytes
        _check_equal(checkpoint, model.state_dict())


def test_shards(sharded: Path) -> None:
    with open_checkpoint(sharded) as checkpoint:
        _check_equal(checkpoint, tiny("llama").state_dict())


def test_generation_config(llama: Path) -> None:
    (llama / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.5}')
    assert open_checkpoint(llama).generation_config == {"eos_token_id": [5, 6], "temperature": 0.5}
    (llama / "generation_config.json").unlink()
    assert open_checkpoint(llama).generation_config == {}


@pytest.mark.parametrize("which", ["single", "shards"])
def test_files_that_no_index_names_are_not_read(which: str, llama: Path, sharded_folder: Path, tmp_path: Path) -> None:
    folder = llama if which == "single" else Path(shutil.copytree(sharded_folder, tmp_path / "shards"))
    other = {name: np.full(t.shape, 7, np.float32) for name, t in tiny("llama").state_dict().items()}
    safetensors.numpy.save_file(other, folder / "consolidated.safetensors")
    (folder / "broken.safetensors").write_bytes(b"no safetensors")
    with open_checkpoint(folder) as checkpoint:
        _check_equal(checkpoint, tiny("llama").state_dict())


def test_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lists '{shard.name}', which is not in the folder. Complete"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.pop("weight_map"), "has no weight_map"),
        (lambda index: index["weight_map"].update(x=3), "has no weight_map"),
        (lambda index: index["weight_map"].update(x="../config.json"), "names '../config.json', which is not a file"),
        (
            lambda index: index["weight_map"].update(x=sorted(index["weight_map"].values())[0]),
            "tensor 'x' is in model-",
        ),
    ],
)
def test_broken_index(sharded: Path, change: object, message: str) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)  # type: ignore[operator]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_checkpoint(sharded)


def test_truncated_weights_name_the_file(llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1024])
    with pytest.raises(CheckpointError, match="model.safetensors is shorter than its header says"):
        open_checkpoint(llama)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{oops", "config.json is not JSON"),
        ("[1]", "must hold a JSON object, not list"),
        ("\x00", "is not JSON"),
    ],
)
def test_config_that_is_no_json_object(llama: Path, content: str, message: str) -> None:
    (llama / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(llama)


def test_missing_files(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights: none of model.safetensors"):
        open_checkpoint(llama)
    (llama / "config.json").unlink()
    with pytest.raises(CheckpointError, match="config.json does not exist. Is this the folder"):
        open_checkpoint(llama)
    with pytest.raises(CheckpointError, match="absent does not exist. Give a folder"):
        open_checkpoint(tmp_path / "absent")


def test_wrong_questions(llama: Path) -> None:
    cube = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    arrays = {"ids": np.arange(4), "line": np.ones(3, np.float32), "cube": cube}
    safetensors.numpy.save_file(arrays, llama / "model.safetensors")
    with open_checkpoint(llama) as checkpoint:
        assert checkpoint.kind("ids") == "I64" and checkpoint.shape("cube") == (2, 3, 2)
        with pytest.raises(CheckpointError, match="'ids' has the type I64; weights can be read as F32, F16"):
            checkpoint.vector("ids")
        with pytest.raises(CheckpointError, match=r"'line' has shape \[3\]; a matrix was expected"):
            checkpoint.stored("line")
        # A stack is one tall matrix, or each of its entries by itself; a vector is flat.
        assert np.array_equal(dense(checkpoint.stored("cube")), cube.reshape(6, 2))
        assert np.array_equal(dense(checkpoint.stored("cube", 1)), cube[1])
        assert np.array_equal(checkpoint.vector("cube", 1), cube[1].reshape(-1))
        with pytest.raises(CheckpointError, match="has no tensor 'absent'"):
            checkpoint.stored("absent")


def test_views_outlive_the_checkpoint(llama: Path) -> None:
    with open_checkpoint(llama) as checkpoint:
        stored = checkpoint.stored("model.embed_tokens.weight")
        assert not stored.data.flags.owndata, "a copy was made"
    assert checkpoint.names() == set()
    assert np.array_equal(dense(stored), tiny("llama").state_dict()["model.embed_tokens.weight"].numpy())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_model_of_gemma_3_with_images(tmp_path: Path, prefix: str) -> None:
    model = tiny("gemma3_text", tie_word_embeddings=True)
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    arrays = {prefix + name.removeprefix("model."): t.numpy() for name, t in state.items()}
    images = {"vision_tower.x": np.ones(2, np.float32), "multi_modal_projector.y": np.ones(2, np.float32)}
    safetensors.numpy.save_file({**arrays, **images}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "eos_token_id": [1, 106],
                "text_config": {"hidden_size": 32, "num_hidden_layers": 2, "sliding_window": 512},
            }
        )
    )
    with open_checkpoint(tmp_path) as checkpoint:
        _check_equal(checkpoint, state)
        config = checkpoint.config
        assert config["architectures"] == ["Gemma3ForCausalLM"] and config["eos_token_id"] == [1, 106]
        assert (config["hidden_size"], config["sliding_window"]) == (32, 512)
        assert (config["head_dim"], config["num_attention_heads"], config["rope_local_base_freq"]) == (256, 8, 10000.0)
