"""Each architecture, on each device, against transformers on the same random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.devices import NAMES, make_device
from tests.models.tiny import VARIANTS, Loaded, make

PROMPTS = [(1, 40), (2, 77), (3, 130)]
"""(seed, length): each longer than every window of the variants."""


class Checkpoints:
    """Each variant's checkpoint, made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: dict[str, tuple[Path, Any]] = {}

    def __getitem__(self, name: str) -> tuple[Path, Any]:
        if name not in self.made:
            self.made[name] = make(name, self.folder)
        return self.made[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("tiny"))


def prompt(seed: int, length: int) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, 199, length - 1).tolist()]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("device", NAMES)
def test_logits_equal_transformers(variant: str, device: str, checkpoints) -> None:
    path, oracle = checkpoints[variant]
    loaded = Loaded(path, make_device(device))
    for seed, length in PROMPTS:
        ids = prompt(seed, length)
        with torch.no_grad():
            want = oracle(torch.tensor([ids])).logits[0].numpy()
        # In float32 transformers is itself up to 2e-5 of the largest logit away from what it finds in float64.
        atol = max(2e-4, 3e-5 * np.abs(want).max())
        np.testing.assert_allclose(loaded.logits(ids, [7, 33]), want, rtol=0, atol=atol)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_equal_transformers(variant: str, checkpoints) -> None:
    path, oracle = checkpoints[variant]
    loaded = Loaded(path, make_device("cpu"))
    ids = prompt(5, 40)
    with torch.no_grad():
        want = oracle.generate(
            torch.tensor([ids]),
            max_new_tokens=24,
            min_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
    blocks = [list(range(8))]
    out = list(ids)
    logits = loaded.compiled.raw_logits(loaded.batch([(out, 0)], blocks))
    for _ in range(24):
        out.append(int(np.argmax(logits[-1])))
        logits = loaded.compiled.raw_logits(loaded.batch([(out[-1:], len(out) - 1)], blocks))
    assert out == want


@pytest.mark.parametrize("variant", VARIANTS)
def test_batched_equals_alone_and_chunked_equals_whole(variant: str, checkpoints) -> None:
    """Bitwise: raw logits of each position, whatever shares the step and however the prompt was cut."""
    loaded = Loaded(checkpoints[variant][0], make_device("cpu"))
    prompts = [prompt(10 + i, n) for i, n in enumerate((1, 5, 31, 33, 64, 100))]
    alone = [loaded.logits(ids) for ids in prompts]
    for ids, want in zip(prompts, alone, strict=True):
        np.testing.assert_array_equal(loaded.logits(ids, [1, 7, 16, 3]), want)
    tables, first = [], 0
    for ids in prompts:
        count = -(-len(ids) // loaded.block_size)
        tables.append(list(range(first, first + count))[::-1])
        first += count
    together = loaded.compiled.raw_logits(loaded.batch([(ids, 0) for ids in prompts], tables, "all"))
    np.testing.assert_array_equal(together, np.concatenate(alone))
