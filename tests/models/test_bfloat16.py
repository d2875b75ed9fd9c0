"""A checkpoint in bfloat16, as it is served unless something else is asked for."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from octavo.build import build
from octavo.config import EngineConfig
from tests.devices import make_device
from tests.models.test_parity import prompt
from tests.models.tiny import Loaded, make, save_bfloat16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bfloat16")
    return save_bfloat16(make("llama", folder)[0], folder / "rounded")


def test_it_is_as_exact_as_a_model_in_bfloat16(path: Path) -> None:
    """The mean error of logits is below that of transformers, which rounds what lies between products too."""
    tokens = prompt(1, 100)

    def published(kind: torch.dtype) -> np.ndarray:  # type: ignore[type-arg]
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=kind)
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0].double().numpy()

    rounded = published(torch.bfloat16)
    exact = published(torch.float32)
    got = Loaded(path, make_device("cpu", activations="bfloat16")).logits(tokens)
    errors = [np.sqrt(np.mean((logits - exact) ** 2)) for logits in (got, rounded)]
    assert 1e-6 < errors[0] < errors[1]
    assert np.abs(Loaded(path, make_device("cpu", activations="float32")).logits(tokens) - exact).max() < errors[0]


def test_start_up_says_so(path: Path) -> None:
    for options, wanted in (
        ({}, "activations bfloat16 because the weights are"),
        ({"dtype": "float32"}, "activations float32 because of --dtype float32"),
        ({"cpu_activations": "float32"}, "activations float32 as asked"),
    ):
        built = build(EngineConfig(model=str(path), max_num_seqs=4, **options))
        assert wanted in "\n".join(built.info.notes)
        built.engine.close()


def test_a_row_has_the_same_bits_in_every_batch(path: Path) -> None:
    prompts = [prompt(seed, n) for seed, n in enumerate((1, 15, 16, 17, 40, 130))]
    want: list[np.ndarray] = []  # type: ignore[type-arg]
    for threads in (2, 1):
        loaded = Loaded(path, make_device("cpu", threads, "bfloat16"))
        tables = [list(range(9 * i, 9 * i + 9)) for i in range(len(prompts))]
        whole = [
            loaded.compiled.raw_logits(loaded.batch([(ids, 0)], [t])) for ids, t in zip(prompts, tables, strict=True)
        ]
        want = want or whole
        for size in (1, 2, 5, 8, 13, 32, 64):
            picked = list(itertools.islice(itertools.cycle(range(len(prompts))), size))
            batch = loaded.batch([(prompts[i][-1:], len(prompts[i]) - 1) for i in picked], [tables[i] for i in picked])
            np.testing.assert_array_equal(loaded.compiled.raw_logits(batch), np.concatenate([want[i] for i in picked]))
