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


@pytest.mark.parametrize("vocab", [100, 5000])
def test_top_p_ends_at_the_id_where_the_mass_is_reached(vocab: int) -> None:
    """Equal logits: top-p of k / V leaves the ids below k. For each seed the id that all of them would draw is the last
    that is left, and then the first that is not."""
    rows = 96
    logits = np.zeros((rows, vocab), np.float32)
    model, make_step = drawing_model(CpuDevice(1), logits)

    def drawn(top_p: float | np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        sampling = parameters(rows, temperature=1, seed=np.arange(rows), top_p=top_p)
        return model.run(make_step(range(rows)), sampling).token.copy()

    best = drawn(1.0)
    assert len(np.unique(best)) > rows / 2
    assert np.array_equal(drawn((best + 0.5) / vocab), best)
    assert (drawn((best - 0.5).clip(0.5) / vocab)[best > 0] < best[best > 0]).all()


@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0])
def test_top_p_of_flat_logits(spread: float) -> None:
    rng, rows, vocab = np.random.default_rng(3), 96, 3000
    logits = (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)
    model, make_step = drawing_model(CpuDevice(1), logits)
    for top_p in (0.001, 0.02, 0.5, 0.97):
        sampling = parameters(rows, temperature=1, seed=np.arange(rows), top_p=top_p)
        assert np.array_equal(model.run(make_step(range(rows)), sampling).token, draw(logits, sampling).token)
