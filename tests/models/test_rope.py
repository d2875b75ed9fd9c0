"""Inverse frequencies of every RoPE kind against transformers' own functions, and logits where a length decides."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.layers.rope import RopeError, make_rope
from tests.devices import make_device
from tests.models.tiny import Loaded, make

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, mscale": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.4,
        "mscale_all_dim": 0.6,
        "beta_fast": 16,
    },
    "yarn, not truncated": {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    "yarn, factor said": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8},
    "longrope": {
        "short_factor": [1.0 + i / 40 for i in range(16)],
        "long_factor": [2.0 + i for i in range(16)],
        "original_max_position_embeddings": 64,
        "factor": 3.0,
    },
    "longrope, factor by length": {
        "short_factor": [1.0 + i / 40 for i in range(16)],
        "long_factor": [2.0 + i for i in range(16)],
        "original_max_position_embeddings": 64,
    },
}
"""By rope_type; what follows a comma only tells them apart."""


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [64, 256])
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    kind = name.split(",")[0]
    native = 64 if kind == "dynamic" else 256
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[name]}
    config = LlamaConfig(
        hidden_size=128, num_attention_heads=4, max_position_embeddings=native, rope_parameters=parameters
    )
    want, scale = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    got = make_rope(parameters, 32, native, length)
    np.testing.assert_allclose(got.inv_freq, want.numpy(), rtol=2e-6)
    assert got.scale == pytest.approx(scale, rel=1e-6)


def test_ckpt_06_dynamic_is_plain_within_the_original_length() -> None:
    plain = make_rope({"rope_type": "default", "rope_theta": 1e4}, 64, 64, 64)
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    assert make_rope(dynamic, 64, 64, 64) == plain
    assert make_rope(dynamic, 64, 64, 256) != plain


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("rope")
    return functools.cache(lambda variant: make(variant, folder)[0])


def logits_of_transformers(path: Path, ids: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(path)(torch.tensor([ids])).logits[0].numpy()


def test_ckpt_06_dynamic_logits_are_plain_within_the_original_length(checkpoints) -> None:
    path = checkpoints("llama-rope-dynamic-stretched")
    ids = np.random.default_rng(6).integers(3, 199, 30).tolist()
    got = Loaded(path, make_device("reference"), max_model_len=64).logits(ids)
    np.testing.assert_allclose(got, logits_of_transformers(path, ids), rtol=0, atol=2e-4)
    config = json.loads((path / "config.json").read_text())
    plain = path.parent / "plain"
    shutil.copytree(path, plain)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    (plain / "config.json").write_text(json.dumps(config))
    np.testing.assert_array_equal(got, Loaded(plain, make_device("reference"), max_model_len=64).logits(ids))


@pytest.mark.parametrize(
    ("variant", "length", "max_model_len"),
    [
        ("llama-rope-long", 20, 64),
        ("llama-rope-long", 100, 512),
        ("llama-rope-llama3", 20, 512),
        ("llama-rope-llama3", 100, 512),
    ],
)
def test_ckpt_07_logits_on_either_side_of_the_original_length(variant, length, max_model_len, checkpoints) -> None:
    """The original length is 64: short factors hold in a device for so many tokens, long ones in one for more."""
    path = checkpoints(variant)
    ids = np.random.default_rng(7).integers(3, 199, length).tolist()
    got = Loaded(path, make_device("reference"), max_model_len=max_model_len).logits(ids)
    np.testing.assert_allclose(got, logits_of_transformers(path, ids), rtol=0, atol=2e-4)


def test_factors_of_a_file_divide_the_frequencies() -> None:
    plain = make_rope({"rope_type": "default", "rope_theta": 1e4}, 8, 64, 64)
    scaled = make_rope({"rope_type": "default", "rope_theta": 1e4, "rope_freq_factors": [1, 2, 4, 8]}, 8, 64, 64)
    np.testing.assert_allclose(scaled.inv_freq, np.array(plain.inv_freq) / [1, 2, 4, 8], rtol=1e-6)
    with pytest.raises(RopeError, match="3 numbers in rope_freq_factors, 4 are needed"):
        make_rope({"rope_type": "default", "rope_theta": 1e4, "rope_freq_factors": [1, 2, 4]}, 8, 64, 64)


def test_unknown_kind_and_missing_key_are_named() -> None:
    with pytest.raises(RopeError, match="'spiral' is not supported; known: .*yarn"):
        make_rope({"rope_type": "spiral", "rope_theta": 1e4}, 8, 64, 64)
    with pytest.raises(RopeError, match="'linear' needs 'factor'"):
        make_rope({"rope_type": "linear", "rope_theta": 1e4}, 8, 64, 64)


WRONG: list[tuple[dict[str, object], str]] = [
    ({"rope_type": "linear", "factor": 0}, "factor = 0"),
    ({"rope_type": "linear", "factor": math.nan}, "factor = nan"),
    ({"rope_type": "linear", "factor": "8"}, "factor = '8'"),
    ({"rope_type": "linear", "factor": None}, "needs 'factor'"),
    (
        {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": -5},
        "original_max_position_embeddings = -5",
    ),
    ({"rope_type": "yarn", "factor": 4, "beta_fast": "x"}, "beta_fast = 'x'"),
    ({"rope_type": "yarn", "factor": 4, "attention_factor": math.inf}, "attention_factor = inf"),
    ({"rope_type": "yarn", "factor": 4, "rope_theta": 1}, "rope_theta above 1"),
    ({"rope_type": "dynamic", "alpha": "x"}, "alpha = 'x'"),
    (
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}
        | {"original_max_position_embeddings": 32},
        "not below high_freq_factor",
    ),
    ({"rope_type": "longrope", "short_factor": "x", "long_factor": "x"}, "long_factor = 'x', numbers are needed"),
    ({"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}, "1 numbers in long_factor, 8 are needed"),
    ({"rope_type": "longrope", "short_factor": [0] * 8, "long_factor": [0] * 8}, "not above 0"),
    ({"rope_type": "longrope", "original_max_position_embeddings": 1}, "original_max_position_embeddings = 1"),
    ({"rope_type": ["yarn"]}, "is not supported"),
    ({"rope_theta": None}, "needs 'rope_theta'"),
    ({"rope_theta": math.nan}, "rope_theta = nan"),
    ({"partial_rotary_factor": 0.01}, "turn 0 of the 16"),
    ({"partial_rotary_factor": 3}, "turn 48 of the 16"),
    ({"partial_rotary_factor": "x"}, "partial_rotary_factor = 'x'"),
    ({"rope_freq_factors": [1.0] * 7}, "7 numbers in rope_freq_factors"),
]


@pytest.mark.parametrize(("parameters", "message"), WRONG)
def test_parameters_that_make_no_rope_are_refused_in_a_sentence(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(RopeError, match=message):
        make_rope({"rope_theta": 10000.0, **parameters}, 16, 64, 512)
