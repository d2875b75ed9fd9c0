"""Servers as users start them: a process of the command line, and clients of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from octavo.api.serve import bind

NAME = "small"
"""What the served models are called."""


@dataclass
class Real:
    """A running server."""

    url: str
    http: httpx.Client
    client: openai.OpenAI
    log: Path
    """Everything the process prints."""
    pid: int

    def complete(self, prompt: object, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions, greedy unless told otherwise; JSON without NaN and Infinity."""
        return self._answer("/v1/completions", {"prompt": prompt, "temperature": 0, **body})

    def chat(self, messages: object, **body: Any) -> dict[str, Any]:
        """The answer of /v1/chat/completions, as `complete`; `messages` may be the text of one user."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self._answer("/v1/chat/completions", {"messages": messages, "temperature": 0, **body})

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = json.loads(response.text, parse_constant=_no_number)
        return answer

    def refused(self, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
        """The error of a request that must be answered 400, after which the server still works."""
        response = self.http.post(path, json=body)
        assert response.status_code == 400, response.text
        self.alive()
        error: dict[str, Any] = response.json()["error"]
        return error

    def alive(self) -> None:
        assert self.http.get("/health").status_code == 200
        assert self.complete([100, 200], max_tokens=1)["usage"]["completion_tokens"] == 1

    def tokens(self, text: str) -> list[int]:
        """Token ids of a plain text."""
        ids: list[int] = self.http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        return ids

    def number(self, name: str) -> float:
        """The sum of a metric over its labels."""
        found = [
            sample.value
            for family in text_string_to_metric_families(self.http.get("/metrics").text)
            for sample in family.samples
            if sample.name == name
        ]
        assert found, name
        return sum(found)


def _no_number(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Real]:
    """`octavo serve MODEL` on a free port, ready to answer; its output goes to a file in `folder`."""
    with bind("127.0.0.1", 0) as found:
        port = found.getsockname()[1]
    log = folder / f"server-{port}.log"
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "octavo",
                "serve",
                str(model),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--served-model-name",
                NAME,
                "--uvicorn-log-level",
                "error",
                *flags,
            ],
            stdout=out,
            stderr=out,
        )
        try:
            deadline = time.monotonic() + 60
            while not _ready(url):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            with httpx.Client(base_url=url, timeout=60) as http:
                yield Real(
                    url, http, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), log, process.pid
                )
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def start_fails(model: Path, *flags: str) -> str:
    """The last line of a server that cannot start: it ends with status 1 and tells no stack."""
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", str(model), "--host", "127.0.0.1", "--port", "0", *flags],
        text=True,
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.strip().split("\n")[-1]
