"""The benchmark of weight formats: two formats with few tokens, and what it computes with."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from benchmarks.formats import ggml
from benchmarks.formats.__main__ import main
from benchmarks.formats.apart import Failed, apart
from benchmarks.formats.files import WRITTEN, matrix_bits, nearest, path_of
from benchmarks.formats.losses import distance
from octavo.checkpoint import open_checkpoint
from octavo.quant import dense
from tests import realmodels
from tests.quant.twins import plain


def test_two_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    out.write_text(json.dumps({"float32": {"by": "octavo", "activations": "float32", "kl": 0.125, "top1": 0.5}}))
    small = ["--folder", str(tmp_path), "--tokens", "24", "--rounds", "1", "--steps", "2"]
    assert main(["--formats", "bitsandbytes nf4,--quantization int8", "--out", str(out), "--markdown", *small]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["float32", "bitsandbytes nf4", "--quantization int8"]
    nf4, int8 = found["bitsandbytes nf4"], found["--quantization int8"]
    assert nf4["bits"] == pytest.approx(4.5, abs=0.02)  # 4, a float32 for 64, and a few hundred bytes a matrix
    assert (nf4["activations"], int8["activations"]) == ("float32", "int16")
    assert 1e-7 < int8["kl"] < 0.01 < nf4["kl"] < 1
    assert int8["memory_mib"] == pytest.approx(int8["file_mib"] * 8.5 / 32, rel=0.02)
    assert all(row["speeds"][0][f"tok_s_{streams}"] > 0 for row in (nf4, int8) for streams in (1, 32))
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[0] for row in rows] == [
        "| format",
        "| float32",
        "| bitsandbytes nf4",
        "| `--quantization int8`",
    ]
    assert "1.2e-01, 50.0%" in rows[1]


def test_a_format_that_fails_does_not_lose_the_others_and_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    broken, there = "GGUF Q4_0", {"by": "octavo", "file_mib": 1.0, "speeds": [{"load_s": 0.5}]}
    out.write_text(json.dumps({"--quantization int4": there}))
    (tmp_path / "GGUF-Q4_0.gguf").write_bytes(b"GGUF and nothing else")
    formats = f"{broken},--quantization int8,--quantization int4"
    again = ["--formats", formats, "--folder", str(tmp_path), "--out", str(out), "--missing", "--rounds", "1"]
    assert main([*again, "--only", "speed,write", "--steps", "2"]) == 1
    found = json.loads(out.read_text())
    assert list(found[broken]) == ["failed"] and list(found[broken]["failed"]) == ["write"]
    assert found["--quantization int8"]["file_mib"] > 500 and "kl" not in found["--quantization int8"]
    assert len(found["--quantization int8"]["speeds"]) == 1 and found["--quantization int4"] == there
    with pytest.raises(Failed, match="GGUF-Q4_0.gguf"):
        apart("benchmarks.formats.speeds", path=str(tmp_path / "GGUF-Q4_0.gguf"), rule=None, steps=2)


@pytest.mark.parametrize("name", [name for name, one in WRITTEN.items() if one.suffix != ".gguf"])
def test_folders_are_read_and_close_to_the_floats(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = plain(tmp_path / "source")
    monkeypatch.setattr(realmodels, "smollm2_hf", lambda: source)
    path = path_of(WRITTEN[name], tmp_path / "made")
    bits = matrix_bits(path)
    with open_checkpoint(path) as made, open_checkpoint(source) as floats:
        assert made.names() == floats.names()
        for matrix in (n for n in floats.names() if n.endswith("_proj.weight")):
            got, want = dense(made.stored(matrix)), dense(floats.stored(matrix))
            error = np.sqrt(((got - want) ** 2).mean() / (want**2).mean())
            assert 0 < error < (0.15 if bits < 6 else 0.04), matrix
    assert bits < 17


def test_distance() -> None:
    want = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], np.float32))
    got = np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], np.float32)) + 3
    kl, top1 = distance(got, want)
    assert kl == pytest.approx((0.5 * np.log(2) - 0.25 * np.log(2)) / 2, rel=1e-5) and top1 == 0.5


def test_nearest() -> None:
    got = nearest(torch.tensor([[-9.0, 0.3], [0.2, 2.6]]), [3.0, -1.0, 0.0, 0.5])
    assert got.tolist() == [[1, 3], [2, 0]]


@pytest.fixture(scope="module")
def quantizer(tmp_path_factory: pytest.TempPathFactory) -> ggml.Quantizer:
    return ggml.Quantizer(tmp_path_factory.mktemp("ggml"))


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "MXFP4", "TQ2_0"])
def test_quantizer_is_that_of_the_gguf_package(kind: str, quantizer: ggml.Quantizer) -> None:
    values = np.random.default_rng(0).standard_normal((100, 256)).astype(np.float32)
    np.testing.assert_array_equal(quantizer(values, kind), gguf.quantize(values, gguf.GGMLQuantizationType[kind]))


def test_quantizer_makes_what_the_package_reads(quantizer: ggml.Quantizer) -> None:
    values = np.random.default_rng(0).standard_normal((100, 256)).astype(np.float32)
    for kind, bound in (("Q6_K", 0.03), ("Q4_K", 0.1), ("IQ4_XS", 0.1)):
        read = gguf.dequantize(quantizer(values, kind), gguf.GGMLQuantizationType[kind])
        assert np.sqrt(((read - values) ** 2).mean()) < bound


def test_types_that_do_not_fit_are_replaced(quantizer: ggml.Quantizer) -> None:
    assert ggml.fitting("Q4_K", 576) == "Q5_0" and ggml.fitting("Q4_K", 1536) == "Q4_K"
    with pytest.raises(ValueError, match="576 elements is not a whole number of Q4_K blocks"):
        quantizer(np.zeros((1, 576)), "Q4_K")
