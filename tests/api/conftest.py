from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.api.harness import GREEDY, ScriptEngine, events_of, parts_of, running


@dataclass
class Api:
    """The server, as tests talk to it."""

    url: str
    http: httpx.Client
    engine: ScriptEngine

    def completion(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={**GREEDY, "prompt": "Hello", **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hello"}]
        return self.http.post("/v1/chat/completions", json={**GREEDY, "messages": messages, **body})

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a stream that ends as it should."""
        default = (
            {"prompt": "Hello"}
            if path.endswith("/v1/completions")
            else {"messages": [{"role": "user", "content": "Hello"}]}
        )
        with self.http.stream("POST", path, json={**GREEDY, **default, "stream": True, **body}) as response:
            raw = response.read()
            assert response.status_code == 200, raw
            events = events_of(raw.decode("utf-8").split("\n"))
        assert events[-1] == "[DONE]" and "[DONE]" not in events[:-1]
        return [httpx.Response(200, text=event).json() for event in events[:-1]]

    def alive(self) -> None:
        """A small completion still works."""
        assert self.http.get("/health").status_code == 200
        assert self.completion(max_tokens=1).json()["choices"][0]["text"] == "Alpha"
        assert not self.engine.live


@pytest.fixture(scope="session")
def _server() -> Iterator[tuple[str, ScriptEngine]]:
    engine = ScriptEngine()
    # It lives as long as the tests: what it logged now and then would be found by those that read the log.
    with running(parts_of(engine), disable_log_stats=True) as url:
        yield url, engine


@pytest.fixture
def api(_server: tuple[str, ScriptEngine]) -> Iterator[Api]:
    url, engine = _server
    fresh = ScriptEngine()
    engine.script, engine.pause, engine.fail_after, engine.cached, engine.queued = fresh.script, 0.0, None, 0, 0.0
    engine.seen.clear()
    engine.aborts.clear()
    with httpx.Client(base_url=url, timeout=20) as http:
        yield Api(url, http, engine)


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a stream."""
    parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts)
