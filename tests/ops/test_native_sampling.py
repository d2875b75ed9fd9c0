"""The sampler's shortcuts (bounds, partial sorts) change no draw: large vocabularies, many ties, all rules together."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.devices.cpu.device import CpuDevice
from octavo.ops.sampling import draw
from tests.ops.harness import drawing_model, parameters


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("step", [0.0, 0.25])
@pytest.mark.parametrize("vocab", [63, 64, 65, 5000])
def test_draws_are_those_of_the_specification(vocab: int, step: float, threads: int) -> None:
    """Logits on a grid of `step` (0: none) tie by the hundred."""
    rng, rows = np.random.default_rng(vocab), 96
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    fields = {
        "temperature": rng.choice([0.3, 1, 2.5], rows),
        "top_k": rng.choice([0, 1, 2, 50, 64, 1000, 10_000], rows),
        "top_p": rng.choice([1, 0.999, 0.9, 0.5, 0.01, 0], rows),
        "min_p": rng.choice([0, 0, 0.01, 0.3, 1], rows),
        "seed": rng.integers(0, 2**63, rows),
        "position": rng.integers(0, 4096, rows),
        "logprobs": rng.choice([-1, 0, 5], rows),
    }
    model, make_step = drawing_model(CpuDevice(threads), logits)
    sampling = parameters(rows, **fields)
    got, expected = model.run(make_step(range(rows)), sampling), draw(logits, sampling)
    assert np.array_equal(got.token, expected.token)
    assert np.array_equal(got.rank, expected.rank)
    assert np.array_equal(got.top_ids, expected.top_ids)
    assert got.ok.all()
