"""Inverse frequencies of every RoPE kind against transformers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.layers.rope import RopeError, make_rope

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0 + i / 40 for i in range(16)],
        "long_factor": [2.0 + i for i in range(16)],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [64, 256])
def test_frequencies_equal_transformers(kind: str, length: int) -> None:
    native = 64 if kind == "dynamic" else 256
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **KINDS[kind]}
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


def test_factors_of_a_file_divide_the_frequencies() -> None:
    plain = make_rope({"rope_type": "default", "rope_theta": 1e4}, 8, 64, 64)
    scaled = make_rope({"rope_type": "default", "rope_theta": 1e4, "rope_freq_factors": [1, 2, 4, 8]}, 8, 64, 64)
    np.testing.assert_allclose(scaled.inv_freq, np.array(plain.inv_freq) / [1, 2, 4, 8], rtol=1e-6)
    with pytest.raises(RopeError, match="holds 3 RoPE frequency factors, 4 are needed"):
        make_rope({"rope_type": "default", "rope_theta": 1e4, "rope_freq_factors": [1, 2, 4]}, 8, 64, 64)


def test_unknown_kind_and_missing_key_are_named() -> None:
    with pytest.raises(RopeError, match="'spiral' is not supported; known: .*yarn"):
        make_rope({"rope_type": "spiral", "rope_theta": 1e4}, 8, 64, 64)
    with pytest.raises(RopeError, match="'linear' needs 'factor'"):
        make_rope({"rope_type": "linear", "rope_theta": 1e4}, 8, 64, 64)
