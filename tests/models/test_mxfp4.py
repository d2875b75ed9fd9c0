"""gpt-oss as it is published, experts in MXFP4, against the same model in bfloat16's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from octavo.build import build
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.ops.contract import Stored
from octavo.ops.reference import ReferenceDevice
from octavo.quant import mxfp4
from tests.devices import NAMES, make_device
from tests.models.converter import Converter
from tests.models.test_parity import prompt
from tests.models.tiny import Loaded, make


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(published, dequantized by transformers)."""
    plain, _ = make("gpt-oss", tmp_path_factory.mktemp("plain"))
    published = tmp_path_factory.mktemp("published")
    tensors, generator = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(1)
    quantized: dict[str, Any] = {}
    for name, value in list(tensors.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, n_in, n_out = value.shape
            blocks = torch.randint(0, 256, (experts, n_out, n_in // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, n_out, n_in // 32), generator=generator, dtype=torch.uint8)
            quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
            assert tensors[name].shape == value.shape
        else:
            quantized[name] = value
    assert len(quantized) > len(tensors)
    save_file(tensors, plain / "model.safetensors")
    save_file(quantized, published / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (published / "config.json").write_text(json.dumps(config))
    return published, plain


@pytest.mark.parametrize("device", NAMES)
def test_published_experts_equal_their_dequantized_values(device: str, pair: tuple[Path, Path]) -> None:
    ids = prompt(3, 60)
    published, plain = (Loaded(path, make_device(device)).logits(ids, [17]) for path in pair)
    assert np.abs(plain).max() > 1
    np.testing.assert_array_equal(published, plain)


def test_experts_of_a_gguf_file_equal_the_published(pair: tuple[Path, Path], tmp_path: Path) -> None:
    ids = prompt(3, 60)
    with Converter() as convert:
        file = convert(pair[0], tmp_path / "m.gguf", {})
    with open_checkpoint(file) as checkpoint:
        assert checkpoint.kind("model.layers.0.mlp.experts.gate_proj.weight") == "MXFP4"
    published, read = (Loaded(path, make_device("reference")).logits(ids) for path in (pair[0], file))
    np.testing.assert_array_equal(read, published)


def test_experts_are_packed_as_they_are_read(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than one and the next are held, of four."""
    held, most = 0, 0

    def blocks_of(codes: Any, scales: Any, real: Any = mxfp4.blocks_of) -> Any:
        nonlocal held, most
        held += 1
        most = max(most, held)
        return real(codes, scales)

    class Device(ReferenceDevice):
        def weight(self, parts: list[Stored]) -> Any:
            nonlocal held
            held = 0
            return super().weight(parts)

    monkeypatch.setattr(mxfp4, "blocks_of", blocks_of)
    Loaded(pair[0], Device())
    assert most == 2


def test_start_up_says_what_it_is(pair: tuple[Path, Path]) -> None:
    built = build(EngineConfig(model=str(pair[0]), quantization="mxfp4", max_num_seqs=2))
    text = "\n".join(built.info.notes)
    assert "F32/MXFP4 weights" in text and "activations int8 because the weights have 2 to 6 bits" in text
    built.engine.close()
