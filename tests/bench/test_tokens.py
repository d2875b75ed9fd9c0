"""Counting tokens: by a server's /tokenize in any of its shapes, by files on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.client import Target
from octavo.bench.options import BenchError
from octavo.bench.tokens import counter
from tests.api.harness import MODEL, ScriptEngine, parts_of, running
from tests.bench.raw import answering
from tests.realmodels import smollm2_gguf, smollm2_hf


def test_a_real_server() -> None:
    with running(parts_of(ScriptEngine()), api_key=("secret",)) as url:
        count = counter(Target(url, "openai", MODEL, "secret"), None)
        assert [count(text) for text in ("", "abc", "🙂")] == [0, 3, 4]
        with pytest.raises(BenchError, match="HTTP 401"):
            counter(Target(url, "openai", MODEL, "wrong"), None)


@pytest.mark.parametrize(
    "shape",
    [
        lambda ids: {"tokens": ids},  # llama.cpp
        lambda ids: {"count": len(ids), "max_model_len": 9, "tokens": ids},  # vLLM
        lambda ids: [{"id": i, "text": "x", "start": 0, "stop": 1} for i in ids],  # TGI
    ],
)
def test_shapes_of_answers(shape: Any) -> None:
    def answer(body: dict[str, Any]) -> tuple[int, list[bytes]]:
        assert body["prompt"] == body["content"] == body["inputs"]
        return 200, [json.dumps(shape(list(range(len(body["prompt"]))))).encode()]

    with answering(answer) as raw:
        assert counter(Target(raw.url, "openai", "m"), None)("four") == 4
    assert raw.paths == ["/tokenize"] * 2 and raw.bodies[1]["model"] == "m"


@pytest.mark.parametrize("status, line", [(404, b"{}"), (200, b"no JSON"), (200, b'{"ids": [1]}'), (200, b"3")])
def test_servers_that_do_not_count(status: int, line: bytes) -> None:
    with answering(lambda body: (status, [line])) as raw, pytest.raises(BenchError) as caught:
        counter(Target(raw.url), None)
    assert str(caught.value).startswith(f"{raw.url} does not tell how many tokens a text has (")
    assert str(caught.value).endswith("--tokenizer, a folder or GGUF file.")


@pytest.mark.parametrize("path", [smollm2_gguf, smollm2_hf])
def test_files_on_this_machine(path: Any) -> None:
    assert counter(Target("http://127.0.0.1:1"), str(path()))("The capital of France is Paris.") == 7


def test_files_that_hold_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    for name in ("x.gguf", ".", "gone"):
        with pytest.raises(BenchError, match="--tokenizer "):
            counter(Target("http://127.0.0.1:1"), str(tmp_path / name))
