from __future__ import annotations

from typing import Any

import pytest

from octavo.checkpoint import open_checkpoint
from octavo.text.gguf_tokenizer import from_gguf
from octavo.text.tokenizer import Tokenizer
from tests import realmodels


@pytest.fixture(scope="session")
def smollm_metadata() -> dict[str, Any]:
    return dict(open_checkpoint(realmodels.smollm2_gguf()).metadata or {})


@pytest.fixture(scope="session")
def gemma_metadata() -> dict[str, Any]:
    return dict(open_checkpoint(realmodels.gemma_gguf()).metadata or {})


@pytest.fixture(scope="session")
def smollm(smollm_metadata: dict[str, Any]) -> Tokenizer:
    return from_gguf(smollm_metadata)


@pytest.fixture(scope="session")
def gemma(gemma_metadata: dict[str, Any]) -> Tokenizer:
    return from_gguf(gemma_metadata)
