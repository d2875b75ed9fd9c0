"""Matrices that bitsandbytes, HQQ, ModelOpt, optimum-quanto and torchao wrote have the values that these packages read
(see make_samples)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from octavo.checkpoint import open_checkpoint
from octavo.quant import dense

SAMPLES = Path(__file__).parent / "samples"

KINDS = {
    "bitsandbytes": {"NF4_32", "FP4_32", "INT8_32", "INT8_128", "F32"},
    "hqq": {"INT4_32", "INT8_32", "F32"},
    "modelopt": {"INT4_32", "INT8_32", "F8_E4M3_32", "E2M1_16", "MXFP4", "F32"},
    "quanto": {"INT4_32", "INT4_128", "INT8_32", "INT8_128", "F8_E4M3_32", "F32"},
    "torchao": {"INT4_32", "INT8_32", "F8_E4M3_32", "F32"},
}


SAID = {"modelopt": {"quant_algo": "MIXED_PRECISION"}}


@pytest.mark.parametrize("method", KINDS)
def test_every_matrix_has_the_values_that_its_maker_reads(method: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": method} | SAID.get(method, {})})
    )
    shutil.copy(SAMPLES / f"{method}.safetensors", tmp_path / "model.safetensors")
    values = load_file(SAMPLES / f"{method}-values.safetensors")
    seen = set()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == values.keys()
        for name, want in values.items():
            stored = checkpoint.stored(name)
            seen.add(stored.kind)
            got = dense(stored)
            assert got.shape == want.shape == checkpoint.shape(name) and stored.kind == checkpoint.kind(name)
            if name.startswith("int8.") and method == "bitsandbytes":  # q * SCB * (1 / 127): rounded in another order
                np.testing.assert_allclose(got, want, rtol=5 * 2**-24, atol=0)
            elif (
                method == "modelopt" and "awq" in name
            ):  # float32 scales: 8 of them and the product are rounded as well
                np.testing.assert_allclose(got, want, rtol=2**-24, atol=16 * 2**-24 * np.abs(want).max() / 7)
            else:
                np.testing.assert_array_equal(got, want, err_msg=name)
    assert seen == KINDS[method]


@pytest.mark.parametrize("sharded", [False, True])
def test_torchaos_pickled_tensors_have_the_same_values(sharded: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "torchao"}}))
    values = load_file(SAMPLES / "torchao-values.safetensors")
    shutil.copy(SAMPLES / "torchao.bin", tmp_path / ("one.bin" if sharded else "pytorch_model.bin"))
    if sharded:
        index = {"weight_map": dict.fromkeys((*values, "plain"), "one.bin")}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.names() == {"plain", *values}
        np.testing.assert_array_equal(checkpoint.vector("plain"), np.ones(3))
        for name, want in values.items():
            np.testing.assert_array_equal(dense(checkpoint.stored(name)), want, err_msg=name)
