"""Tables of embeddings, and heads, that were quantized with the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.checkpoint import open_checkpoint
from tests.devices import NAMES, make_device
from tests.models.test_parity import prompt
from tests.models.tiny import Loaded
from tests.quant import test_modelopt, test_torchao
from tests.quant.twins import Parts, plain, twins

TABLES = ("embed_tokens.weight", "lm_head.weight")


def compressed(weight: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """compressed-tensors' W8A16: a scale per row."""
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / 127  # the row of the padding id is zeros
    q = (weight / scale).round().clamp(-128, 127)
    octets = (q + 128).to(torch.uint8).reshape(len(weight), -1, 4)
    shape = torch.tensor(weight.shape, dtype=torch.int32)
    packed = octets.view(torch.int32).reshape(len(weight), -1)
    return {".weight_packed": packed, ".weight_scale": scale, ".weight_shape": shape}, q * scale


GROUP = {"targets": ["Linear", "Embedding"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}}


@pytest.mark.parametrize("device", NAMES)
@pytest.mark.parametrize(
    ("quantize", "said", "kind"),
    [
        (compressed, COMPRESSED, "INT8_128"),
        (test_torchao.intx, test_torchao.SAID, "INT4_32"),
        (test_modelopt.int8, test_modelopt.SAID, "INT8_128"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_values(
    tied: bool, quantize: Any, said: dict[str, Any], kind: str, device: str, tmp_path: Path
) -> None:
    original = plain(tmp_path / "original", tie_word_embeddings=tied, vocab_size=200)
    published, values = twins(original, tmp_path, quantize, said, TABLES)
    if said is test_torchao.SAID:
        test_torchao.told(published, test_torchao.INTX)
    with open_checkpoint(published) as checkpoint:
        assert checkpoint.kind("model.embed_tokens.weight") == kind
        assert tied or checkpoint.kind("lm_head.weight") == kind
    got, want = (Loaded(path, make_device(device)).logits(prompt(3, 40), [17]) for path in (published, values))
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())
