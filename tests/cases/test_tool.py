"""Tool calls, as far as a server can go that neither parses nor forces them: a forced call is refused by the field's
name and harms nobody; what looks like a call is text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.api.conftest import Api, text_of
from tests.api.harness import ids_of
from tests.cases.neighbour import neighbour

CHAT = "/v1/chat/completions"
CALL = '<tool_call>{"name":"f","arguments":{"s":"a\\"}b</x>"}}</tool_call>'
"""As a model says it: the string is `a"}b</x>`."""


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WRITE = tool("write", text={"type": "string", "minLength": 400})
NESTED = [
    tool("move", to={"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}),
    tool("paint", colour={"type": "object", "properties": {"name": {"type": "string"}}}),
]
TREE = {
    "type": "object",
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                side: {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/node"}]} for side in ("left", "right")
            },
        }
    },
}


def refused(api: Api, **body: Any) -> None:
    """Streamed or not, the answer is one error that names tool_choice."""
    for stream in (False, True):
        response = api.chat(stream=stream, **body)
        assert response.status_code == 400 and response.headers["content-type"] == "application/json"
        error = response.json()["error"]
        assert error["param"] == "tool_choice" and "tool" in error["message"]


@pytest.mark.parametrize("max_tokens", [8, 64])
def test_tool_01_a_required_call_that_cannot_be_forced_is_refused(api: Api, max_tokens: int) -> None:
    with neighbour(api):
        refused(api, tools=[WRITE], tool_choice="required", seed=1, max_tokens=max_tokens)


def test_tool_02_a_required_call_of_nested_parameters_is_refused(api: Api) -> None:
    with neighbour(api):
        refused(api, tools=NESTED, tool_choice="required", max_tokens=256)


def test_tool_04_with_none_a_call_is_text(api: Api) -> None:
    api.engine.script = lambda request, choice: ids_of(CALL)
    body: dict[str, Any] = {"tools": [tool("f", s={"type": "string"})], "tool_choice": "none", "max_tokens": 200}
    [choice] = api.chat(**body).json()["choices"]
    assert choice["message"]["content"] == CALL and not choice["message"].get("tool_calls")
    assert choice["finish_reason"] == "stop"
    chunks = api.stream(CHAT, **body)
    assert text_of(chunks) == CALL
    assert not any("tool_calls" in choice["delta"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [WRITE], "tool_choice": {"type": "function", "function": {"name": "read"}}},
        {"tools": [WRITE], "tool_choice": {"type": "function"}},
        {"tool_choice": "required"},
        {"tools": [], "tool_choice": "required"},
        {"tools": [], "tool_choice": {"type": "function", "function": {"name": "write"}}},
    ],
)
def test_tool_04_impossible_choices_are_refused(api: Api, body: dict[str, Any]) -> None:
    with neighbour(api):
        refused(api, **body)


def test_tool_06_a_recursive_schema_is_never_ignored(api: Api) -> None:
    recursive = {"type": "function", "function": {"name": "plant", "parameters": TREE}}
    with neighbour(api):
        refused(api, tools=[recursive], tool_choice="required")
        refused(api, tools=[recursive], tool_choice={"type": "function", "function": {"name": "plant"}})


def test_tool_06_a_recursive_schema_reaches_the_template(api: Api) -> None:
    tools = [{"type": "function", "function": {"name": "plant", "parameters": TREE}}]
    assert api.chat(tools=tools, max_tokens=1).status_code == 200
    told = bytes(token for token in api.engine.seen[0].prompt if token < 256).decode()
    assert json.dumps(TREE) in told


@pytest.mark.parametrize("length", [len(CALL), len(CALL) // 2, 5])
def test_tool_07_what_looks_like_a_call_is_streamed_as_it_is(api: Api, length: int) -> None:
    api.engine.script = lambda request, choice: list(CALL.encode())
    body: dict[str, Any] = {"tools": [tool("f", s={"type": "string"})], "max_tokens": length}
    [choice] = api.chat(**body).json()["choices"]
    assert choice["message"]["content"] == CALL[:length] and choice["finish_reason"] == "length"
    chunks = api.stream(CHAT, **body)
    assert text_of(chunks) == CALL[:length]
    [end] = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert end == "length"
