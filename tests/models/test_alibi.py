"""ALiBi's slopes against transformers' own functions, for every number of heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from octavo.layers.alibi import alibi_slopes
from octavo.models.registry import find

HEADS = [*range(1, 65), 71, 112, 128]


@pytest.mark.parametrize("heads", HEADS)
def test_slopes_equal_blooms(heads: int) -> None:
    want = _get_alibi_slopes(heads, torch.device("cpu")).numpy()
    np.testing.assert_allclose(alibi_slopes(heads), want, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("steepest", [8, 16])
def test_slopes_equal_mpts(heads: int, steepest: int) -> None:
    """The bias of the last key but one, seen from the last, is minus the slope."""
    want = -build_mpt_alibi_tensor(heads, 2, alibi_bias_max=steepest)[:, 0, 0].numpy()
    np.testing.assert_allclose(alibi_slopes(heads, steepest), want, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_falcons_slopes_are_bfloat16_and_scaled_with_the_scores(heads: int) -> None:
    raw = {
        "architectures": ["FalconForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 64 * heads,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "alibi": True,
    }
    architecture = find(raw)
    attention = architecture.make(architecture.config(raw), 512).blocks[0].attn
    want = build_alibi_tensor(torch.ones(1, 2, dtype=torch.long), heads, torch.float32)[:, 0, 1].numpy() / 8
    np.testing.assert_array_equal(np.float32(attention.shape.alibi), want)
