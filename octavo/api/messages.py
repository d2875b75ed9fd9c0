"""The messages of a chat request, checked and reduced to what chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.api.errors import ApiError, bad_request

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MEDIA_PARTS = frozenset({"image_url", "input_image", "image", "input_audio", "audio_url", "video_url", "file"})
_TEXTS = ("name", "tool_call_id")
_CHECKED = frozenset({"role", "content", "tool_calls"})


def checked_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages without nulls, and text parts as `{"type": "text"}`. Keys that nothing here knows stay: the
    model's template may read them.

    Raises:
        ApiError: 400 that names the message.
    """
    if not messages:
        raise bad_request("messages must hold at least one message.", "messages")
    return [
        message if _is_plain(message) else _checked(message, f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


def _is_plain(message: dict[str, Any]) -> bool:
    """A role and a text, as most messages of a long history are."""
    role = message.get("role")
    return len(message) == 2 and type(role) is str and role != "" and type(message.get("content")) is str


def _checked(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{where}.role must be a string such as user, got {role!r}.", f"{where}.role")
    calls = _tool_calls(message.get("tool_calls"), where)
    content = _content(message.get("content"), f"{where}.content")
    if content is None and not calls:
        if role != "assistant":
            raise bad_request(f"{where}.content is missing.", f"{where}.content")
        content = ""
    for name in _TEXTS:
        if not isinstance(message.get(name), (str, type(None))):
            raise bad_request(f"{where}.{name} must be a string.", f"{where}.{name}")
    kept = {name: value for name, value in message.items() if value is not None and name not in _CHECKED}
    return {"role": role, "content": content, **kept, **({"tool_calls": calls} if calls else {})}


def _content(content: Any, where: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts.", where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        raise bad_request(f"{where} must be an object with a type.", where)
    kind = str(part.get("type"))
    if kind in _TEXT_PARTS:
        if not isinstance(part.get("text"), str):
            raise bad_request(f"{where}.text must be a string.", f"{where}.text")
        return {"type": "text", "text": part["text"]}
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    if kind in _MEDIA_PARTS:
        raise ApiError(
            400, f"{where} is of type {kind}, but this model takes text only.", param=where, code="unsupported_content"
        )
    raise bad_request(f"{where}.type must be text, got {kind[:80]!r}.", f"{where}.type")


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not calls:
        return []
    if not isinstance(calls, list):
        raise bad_request(f"{where}.tool_calls must be a list.", f"{where}.tool_calls")
    return [_tool_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where} must be an object with function.name.", where)
    arguments = function.get("arguments")
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def last_text(messages: Sequence[dict[str, Any]]) -> str:
    """The text of the last message."""
    content = messages[-1]["content"]
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""
