"""Stacks of MXFP4 whose codes and scales are tensors of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.checkpoint import CheckpointError, open_checkpoint
from octavo.quant import dense

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def write(folder: Path, tensors: dict[str, Any], method: str = "mxfp4") -> Path:
    config = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stack() -> dict[str, Any]:
    """Three matrices [6, 96]."""
    rng = np.random.default_rng(0)
    return {
        "mlp.up_blocks": rng.integers(0, 256, (3, 6, 3, 16), np.uint8),
        "mlp.up_scales": rng.integers(120, 130, (3, 6, 3), np.uint8),
        "norm.weight": np.ones(4, np.float32),
    }


def test_codes_and_scales_are_one_stack(tmp_path: Path) -> None:
    tensors = stack()
    codes, scales = tensors["mlp.up_blocks"], tensors["mlp.up_scales"]
    pairs = np.stack([VALUES[codes & 15], VALUES[codes >> 4]], axis=-1).reshape(3, 6, 3, 32)
    want = (pairs * 2.0 ** (scales[..., None].astype(int) - 127)).reshape(3, 6, 96)
    with open_checkpoint(write(tmp_path, tensors)) as checkpoint:
        assert checkpoint.names() == {"mlp.up_blocks", "norm.weight"}
        assert (checkpoint.kind("mlp.up_blocks"), checkpoint.shape("mlp.up_blocks")) == ("MXFP4", (3, 6, 96))
        assert checkpoint.bytes_of("mlp.up_blocks") == codes.nbytes + scales.nbytes
        assert checkpoint.total_bytes == codes.nbytes + scales.nbytes + 16
        for e in range(3):
            stored = checkpoint.stored("mlp.up_blocks", e)
            assert (stored.kind, stored.n_out, stored.n_in) == ("MXFP4", 6, 96)
            assert np.array_equal(dense(stored), want[e])
        assert np.array_equal(dense(checkpoint.stored("mlp.up_blocks")), want.reshape(18, 96))


def test_quant_09_a_method_that_is_not_known_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is quantized with 'foo', which cannot be read; known are .*mxfp4"):
        open_checkpoint(write(tmp_path, stack(), "foo"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp.up_scales": None}, "'mlp.up' cannot be read as mxfp4: it has no scales"),
        ({"mlp.up_blocks": None}, "'mlp.up' cannot be read as mxfp4: it has no blocks"),
        ({"mlp.up_scales": np.zeros((3, 6, 2), np.uint8)}, r"_scales U8 \[3, 6, 2\]"),
        ({"mlp.up_scales": np.zeros((3, 6, 3), np.int8)}, "_scales I8"),
        ({"mlp.up_blocks": np.zeros((3, 6, 3, 8), np.uint8)}, r"is U8 \[3, 6, 3, 8\]"),
        ({"mlp.up_blocks": np.zeros(16, np.uint8), "mlp.up_scales": np.zeros((), np.uint8)}, r"is U8 \[16\]"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tensors = {name: value for name, value in {**stack(), **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path, tensors))
