"""What the tests of real clients talk to: the scripted server of tests/api, and the real model of tests/cases."""

from __future__ import annotations

import pytest

from tests.api.conftest import _server, api  # noqa: F401
from tests.cases.conftest import oracle, real  # noqa: F401


@pytest.fixture(autouse=True)
def _nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients read the environment: no tracing service and no key of the user may take part."""
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2", "OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_ORG_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
