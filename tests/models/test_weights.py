"""The strict loader: nothing missing, nothing left over, nothing of another shape."""

from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.checkpoint import Checkpoint, open_checkpoint
from octavo.models import weights
from octavo.models.config import ModelConfig, ModelConfigError
from octavo.models.registry import find
from octavo.models.weights import LoadError
from tests.devices import make_device
from tests.models.tiny import VARIANTS, Loaded, make


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


class Hidden:
    """A checkpoint seen with one tensor gone, renamed, or of another shape."""

    def __init__(self, real: Checkpoint, gone: str = "", renamed: str = "", reshaped: str = "") -> None:
        self.real, self.gone, self.renamed, self.reshaped = real, gone, renamed, reshaped
        self.style = real.style

    def names(self) -> set[str]:
        names = self.real.names() - {self.gone}
        return names - {self.renamed} | {self.renamed + "_"} if self.renamed else names

    def shape(self, name: str) -> tuple[int, ...]:
        shape = self.real.shape(name.removesuffix("_") if name == self.renamed + "_" else name)
        return shape if name != self.reshaped else (shape[0] + 1, *shape[1:]) if shape else (1,)

    def in_groups(self, name: str) -> bool:
        return False

    def as_linear(self, name: str) -> bool:
        return False

    def stored(self, name: str, index: int | None = None) -> Any:
        raise AssertionError("bytes were read before the names and shapes were checked")

    vector = stored


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_checkpoint_loads_with_a_tensor_gone_renamed_or_reshaped(variant: str, tmp_path: Path) -> None:
    """Every kind of tensor (names but for their numbers) of every variant, three ways."""
    path, _ = make(variant, tmp_path)
    with open_checkpoint(path) as real:
        found = find(real.config)
        config = found.config(real.config)
        kinds = {re.sub(r"\.\d+\.", ".N.", name): name for name in sorted(real.names())}
        optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
        ignored = [
            n for n in kinds.values() if any(fnmatch.fnmatch(n, p) for p in found.ignore(config)) or n in optional
        ]
        assert len(ignored) < len(kinds) / 2
        for name in sorted(set(kinds.values()) - set(ignored)):
            for change in ("gone", "renamed", "reshaped"):
                model = found.make(config, 512)
                with pytest.raises(LoadError, match=re.escape(name)):
                    weights.load(
                        model,
                        Hidden(real, **{change: name}),
                        found.names(config),
                        make_device("reference"),
                        found.ignore(config),
                    )
