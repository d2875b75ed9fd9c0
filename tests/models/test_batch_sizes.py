"""Raw logits, bitwise, over the batch sizes and context lengths where tiles, steps and chunks begin and end."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.devices import make_device
from tests.models.tiny import Loaded, make

SIZES = [1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 100]
CONTEXTS = [1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 1100]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def path(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp("sizes"))[0]


@pytest.mark.parametrize("activations", ["float32", "int16", "int8"])
@pytest.mark.parametrize("kv_dtype", ["float16", "float32", "fp8_e4m3", "int8"])
def test_a_decoded_row_has_the_same_bits_in_every_batch(path: Path, activations: str, kv_dtype: str) -> None:
    """One sequence per context length is computed whole and alone; then its last token again, among M - 1 others that
    repeat the list, with one thread and with two."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 199, n).tolist() for n in CONTEXTS]
    want: list[np.ndarray] = []  # type: ignore[type-arg]
    for threads in (2, 1):
        loaded = Loaded(
            path,
            make_device("cpu", threads, activations),
            max_model_len=1200,
            blocks=300,
            tokens=1200,
            sequences=128,
            kv_dtype=kv_dtype,
        )
        tables, first = [], 0
        for ids in prompts:
            count = -(-len(ids) // loaded.block_size)
            tables.append(list(range(first, first + count)))
            first += count
        whole = [
            loaded.compiled.raw_logits(loaded.batch([(ids, 0)], [t])) for ids, t in zip(prompts, tables, strict=True)
        ]
        want = want or whole
        for size in SIZES:
            picked = list(itertools.islice(itertools.cycle(range(len(prompts))), size))
            batch = loaded.batch([(prompts[i][-1:], len(prompts[i]) - 1) for i in picked], [tables[i] for i in picked])
            np.testing.assert_array_equal(loaded.compiled.raw_logits(batch), np.concatenate([want[i] for i in picked]))
