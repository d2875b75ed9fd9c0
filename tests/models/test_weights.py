"""The strict loader: nothing missing, nothing left over, nothing of another shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.registry import find
from octavo.models.weights import LoadError
from tests.devices import make_device
from tests.models.tiny import Loaded, make


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("strict"))[0]


@pytest.fixture
def editable(llama: Path, tmp_path: Path):
    """(folder, tensors, save): a copy of the checkpoint whose tensors can be changed."""
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    tensors = dict(load_file(llama / "model.safetensors"))
    return tmp_path, tensors, lambda: save_file(tensors, tmp_path / "model.safetensors")


def load(folder: Path) -> Loaded:
    return Loaded(folder, make_device("reference"))


def test_every_single_missing_tensor_is_named(llama: Path, editable) -> None:
    folder, tensors, save = editable
    for name in sorted(tensors):
        kept = tensors.pop(name)
        save()
        with pytest.raises(LoadError, match=name.replace(".", r"\.") + " is missing"):
            load(folder)
        tensors[name] = kept


def test_renamed_tensor_is_named_with_its_neighbour(editable) -> None:
    folder, tensors, save = editable
    tensors["model.layers.1.mlp.down_projj.weight"] = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save()
    with pytest.raises(LoadError, match=r"down_proj\.weight is missing \(the checkpoint has .*down_projj\.weight\)"):
        load(folder)


def test_leftover_tensor_is_named(editable) -> None:
    folder, tensors, save = editable
    tensors["model.layers.0.self_attn.extra"] = np.zeros((2, 2), np.float32)
    save()
    with pytest.raises(LoadError, match=r"self_attn\.extra is in the checkpoint, but .* does not use it"):
        load(folder)


def test_wrong_shape_names_both(editable) -> None:
    folder, tensors, save = editable
    name = "model.layers.2.self_attn.k_proj.weight"
    tensors[name] = np.ascontiguousarray(tensors[name][:16])
    save()
    with pytest.raises(LoadError, match=r"k_proj\.weight has shape \[16, 64\], \[32, 64\] is needed"):
        load(folder)


def test_ckpt_08_untied_without_head_names_lm_head(editable) -> None:
    folder, tensors, save = editable
    del tensors["lm_head.weight"]
    save()
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing"):
        load(folder)


def test_ckpt_08_tied_model_needs_no_head_and_ignores_a_stored_one(editable) -> None:
    folder, tensors, save = editable
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    save()
    stored = load(folder).logits([1, 5, 9])
    del tensors["lm_head.weight"]
    save()
    np.testing.assert_array_equal(load(folder).logits([1, 5, 9]), stored)


def test_rotary_buffers_of_old_checkpoints_are_ignored(editable) -> None:
    folder, tensors, save = editable
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save()
    load(folder)


def test_ckpt_04_head_dim_null_means_hidden_over_heads() -> None:
    raw = {
        "vocab_size": 9,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "head_dim": None,
    }
    assert ModelConfig.read(raw, "LlamaForCausalLM").head_dim == 16
    assert ModelConfig.read({**raw, "head_dim": 32}, "LlamaForCausalLM").head_dim == 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads = '4'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_act": "mish"}, "activation 'mish' is not supported; known: .*silu"),
        ({"rope_theta": -1}, "rope_theta = -1"),
        ({"layer_types": ["full_attention"]}, "layer_types lists 1"),
    ],
)
def test_broken_config_says_which_key(change: dict[str, object], message: str) -> None:
    raw = {
        "vocab_size": 9,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        **change,
    }
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.read(raw, "LlamaForCausalLM")


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(ModelConfigError, match="MambaForCausalLM is not supported yet.*LlamaForCausalLM"):
        find({"architectures": ["MambaForCausalLM"]})
    with pytest.raises(ModelConfigError, match="nearest is LlamaForCausalLM"):
        find({"architectures": ["LLamaForCausalLM"]})
    with pytest.raises(ModelConfigError, match="names no architecture"):
        find({})
