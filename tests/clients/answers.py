"""Answers of the two generating endpoints in one form, whether they came whole or as a stream, and what every stream
must keep to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@dataclass
class Choice:
    """One choice, joined from its parts."""

    text: str = ""
    logprobs: Any = None
    """The lists of its parts, joined; None without logprobs."""
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None


@dataclass
class Answer:
    """What a client knows in the end."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    prompt_token_ids: list[int] | None = None
    """Of a chat, where it stands beside the choices."""
    prompt_logprobs: list[Any] | None = None
    warnings: list[str] | None = None


def ask(http: httpx.Client, path: str, body: dict[str, Any]) -> Answer:
    """The whole answer to `body`."""
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    data = json.loads(response.text, parse_constant=_no_number)
    found = Answer(usage=data["usage"])
    _take_prompt(found, data)
    for choice in data["choices"]:
        assert choice["index"] not in found.choices
        made = found.choices.setdefault(choice["index"], Choice())
        _join(made, choice, choice["message"]["content"] if path == CHAT else choice["text"])
        assert made.finish_reason is not None
    assert list(found.choices) == sorted(found.choices)
    return found


def ask_stream(http: httpx.Client, path: str, body: dict[str, Any], usage: str = "last") -> Answer:
    """The same through a stream, which must keep to the rules.

    `usage`: "none", "last" (a chunk after all others tells it) or "always" (so does every chunk).
    """
    options = {"none": None, "last": {"include_usage": True}}.get(
        usage, {"include_usage": True, "continuous_usage_stats": True}
    )
    with http.stream("POST", path, json={**body, "stream": True, "stream_options": options}) as response:
        raw = response.read()
    assert response.status_code == 200, raw
    assert response.headers["content-type"].partition(";")[0] == "text/event-stream"
    return joined(path, chunks_of(raw), usage)


def chunks_of(raw: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream: each event is one line of JSON, comments are passed over, `[DONE]` is the end."""
    assert raw.endswith(b"data: [DONE]\n\n")
    events = [event for event in raw.decode("utf-8").split("\n\n")[:-1] if not event.startswith(":")]
    assert events.count("data: [DONE]") == 1
    found = []
    for event in events[:-1]:
        assert event.startswith("data: {") and "\n" not in event
        found.append(json.loads(event.removeprefix("data: "), parse_constant=_no_number))
    return found


def joined(path: str, chunks: Iterable[dict[str, Any]], usage: str) -> Answer:
    """The answer that `chunks` make; checks the rules of streams on the way."""
    found = Answer()
    envelopes = set()
    counted = 0
    for chunk in chunks:
        envelopes.add(tuple(chunk[name] for name in ("id", "object", "created", "model")))
        assert found.usage is None, "a chunk after the one that tells usage"
        if not chunk["choices"]:
            assert usage != "none", "a chunk without choices that nobody asked for"
            found.usage = chunk["usage"]
            continue
        if usage == "always":
            assert counted <= chunk["usage"]["completion_tokens"], "usage went back"
            counted = chunk["usage"]["completion_tokens"]
        else:
            assert chunk.get("usage") is None
        _take_prompt(found, chunk)
        for part in chunk["choices"]:
            _take(found, path, part)
    assert len(envelopes) == 1, "all chunks carry the same id, object, time and model"
    assert (found.usage is None) == (usage == "none")
    if usage == "always":
        assert found.usage is not None and counted == found.usage["completion_tokens"]
    assert all(choice.finish_reason for choice in found.choices.values())
    return found


def _take(found: Answer, path: str, part: dict[str, Any]) -> None:
    new = part["index"] not in found.choices
    choice = found.choices.setdefault(part["index"], Choice())
    assert choice.finish_reason is None, "something of a choice comes after its end"
    text = part["text"] if path == TEXT else part["delta"].get("content") or ""
    if path == CHAT:
        assert ("role" in part["delta"]) == new, "the role is told once, at the beginning"
    _join(choice, part, text)


def _take_prompt(found: Answer, data: dict[str, Any]) -> None:
    for name in ("prompt_token_ids", "prompt_logprobs", "warnings"):
        if data.get(name) is not None:
            assert getattr(found, name) is None, f"{name} came twice"
            setattr(found, name, data[name])


def _join(choice: Choice, part: dict[str, Any], text: str) -> None:
    choice.text += text
    choice.finish_reason = part["finish_reason"]
    choice.stop_reason = part.get("stop_reason")
    if part["logprobs"] is not None:
        choice.logprobs = choice.logprobs or {name: [] for name in part["logprobs"]}
        assert len({len(values) for values in part["logprobs"].values()}) == 1, "lists of different lengths"
        for name, values in part["logprobs"].items():
            choice.logprobs[name] += values
    if part.get("token_ids") is not None:
        choice.token_ids = (choice.token_ids or []) + part["token_ids"]
    for name in ("prompt_token_ids", "prompt_logprobs"):
        if part.get(name) is not None:
            assert getattr(choice, name) is None, f"{name} came twice"
            setattr(choice, name, part[name])


def _no_number(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")
