"""The models of these tests, each loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from octavo import LLM
from tests import realmodels
from tests.api.conftest import _server, api  # noqa: F401
from tests.cases.real import Real, serving
from tests.cases.successor import write_successor

SAID = "🙂 naïve 漢字    b"
"""What the successor model says after a line break; most characters take several tokens."""
SAID_IDS = (10813, 38887, 15486, 46494, 17097, 137, 112, 36518, 333, 278)
LINE_BREAK, EOS = 198, 2


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """SmolLM2, computed in float32."""
    with serving(
        realmodels.smollm2_gguf(),
        tmp_path_factory.mktemp("real"),
        "--dtype",
        "float32",
        "--max-model-len",
        "1024",
        "--kv-cache-memory-bytes",
        "256MiB",
    ) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """A server whose model says `SAID` and stops; see tests.cases.successor."""
    folder = tmp_path_factory.mktemp("scripted")
    write_successor(folder / "model", (LINE_BREAK, *SAID_IDS, EOS), realmodels.smollm2_hf())
    with serving(folder / "model", folder, "--kv-cache-memory-bytes", "16MiB") as server:
        yield server


@pytest.fixture(scope="session")
def smol() -> Iterator[LLM]:
    """SmolLM2 in this process, as users run it: activations in 8 bits, keys and values in 16."""
    with LLM(str(realmodels.smollm2_gguf()), max_model_len=512, kv_cache_memory_bytes="64MiB") as llm:
        yield llm


@pytest.fixture(scope="session")
def gemma() -> Iterator[LLM]:
    """Gemma 3, asked to run in float16."""
    with LLM(
        str(realmodels.gemma_gguf()),
        dtype="float16",
        cpu_activations="float32",
        kv_cache_dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes="256MiB",
    ) as llm:
        yield llm


@pytest.fixture(scope="session")
def oracle() -> Any:
    """SmolLM2 in transformers, float32: `oracle(ids)` is [len(ids), vocabulary], the logits in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(realmodels.smollm2_hf(), dtype=torch.float32).eval()

    def logits(ids: list[int]) -> Any:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].double().numpy()

    return logits
