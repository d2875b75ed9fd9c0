"""Anthropic's /v1/messages and /v1/messages/count_tokens.

Only text is there: blocks of text in, one block out. Calls of tools stay in its text, as in a chat.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.api.answers import Answer, Times
from octavo.api.body import parse
from octavo.api.call import Call, begin, start, stream_answer, times_of, warning_headers, whole_answer
from octavo.api.chat import ChatPlan, plan_chat
from octavo.api.dialect import Dialect, named_frame
from octavo.api.errors import ApiError, bad_request, given_as, not_built
from octavo.api.frontend import service_of
from octavo.api.generation import Generation, News
from octavo.api.messages import checked_messages
from octavo.api.models import json_response
from octavo.api.openapi import Operation
from octavo.api.prompts import encode_chat
from octavo.api.schemas import Body, ChatBody, Ignored, Nested, SamplingBody, about

_NAMES = {
    "prompt": "messages",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "stop": "stop_sequences",
}
_BILLING = "x-anthropic-billing-header"
"""Begins a line of the system prompt that differs from request to request: with it no prompt could be cached."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class MessagesErrorDetail(Answer):
    type: str
    message: Annotated[str, Field(description="What is wrong, and what to do.")]


class MessagesError(Answer):
    """Every error, and the last event of a stream that failed."""

    type: Literal["error"]
    error: MessagesErrorDetail


def _problem(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


DIALECT = Dialect(
    event=named_frame, problem=_problem, error=MessagesError, comment=b'event: ping\ndata: {"type":"ping"}\n\n'
)


class OutputConfig(Nested):
    """How the answer is to be."""

    not_built = {"format": ((), "Constrained (structured) output")}

    effort: Annotated[str | None, about("The variable reasoning_effort of the chat template.")] = None


class CountTokensBody(Body):
    """POST /v1/messages/count_tokens."""

    not_built = {"mcp_servers": (([],), "Calling of tools by the server")}
    unread = Body.unread | {"cache_control"}  # prompts are cached without it

    messages: Annotated[
        list[dict[str, Any]],
        about(
            "Turns of user and assistant; the answer goes on in the last one if that is the assistant's.", minItems=1
        ),
    ]
    system: Annotated[
        Any,
        WithJsonSchema({"anyOf": [*_TEXT_OR_BLOCKS["anyOf"], {"type": "null"}], "description": "What comes first."}),
    ] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions, for the chat template.")] = None
    tool_choice: Annotated[dict[str, Any] | None, about("none or auto; forcing a call is not built.")] = None
    thinking: Annotated[dict[str, Any] | None, about("Thinking is not separated from the answer.")] = None
    output_config: Annotated[OutputConfig | None, about("How the answer is to be.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the chat template.")] = None

    def ignored(self) -> list[Ignored]:
        found = super().ignored()
        if self.thinking is not None and self.thinking.get("type") != "disabled":
            why = "The field `thinking` has no effect: thinking is not separated from the answer here."
            found.append(Ignored("thinking", why))
        return found

    def refuse_unbuilt(self, prefix: str = "") -> None:
        super().refuse_unbuilt(prefix)
        if self.output_config is not None:
            self.output_config.refuse_unbuilt("output_config.")

    def chat(self, **fields: Any) -> ChatBody:
        """The same as a chat, with further fields."""
        messages = _messages(self.messages)
        if self.system is not None:
            texts = [text for text in map(_without_billing, _system_texts(self.system)) if text]
            messages[:0] = [{"role": "system", "content": _joined(texts)}] if texts else []
        go_on = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1] if messages else False
        return ChatBody(
            **{"model": self.model, **fields},
            messages=messages,
            tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools or ())] or None,
            tool_choice=_tool_choice(self.tool_choice),
            reasoning_effort=self.output_config.effort if self.output_config else None,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=go_on or None,
        )


class MessagesBody(CountTokensBody, SamplingBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, about("Most tokens of the answer; less where the context ends before.", minimum=1)]
    stop_sequences: Annotated[list[str] | None, about("Texts that end the answer.")] = None


class TextBlock(Answer):
    type: Literal["text"]
    text: str


class MessagesUsage(Answer):
    input_tokens: Annotated[int, Field(description="Without those that were cached.")]
    output_tokens: int
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: Annotated[int, Field(description="Input that did not have to be computed again.")]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "model_context_window_exceeded"]


class MessagesAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[TextBlock]
    model: str
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    metrics: Times | None = None


class MessagesEvent(Answer):
    """One event of a streamed answer; which fields there are depends on its type."""

    type: str
    message: MessagesAnswer | None = None
    index: int | None = None
    content_block: TextBlock | None = None
    delta: dict[str, Any] | None = None
    usage: MessagesUsage | None = None
    metrics: Times | None = None


class TokenCount(Answer):
    input_tokens: int


@dataclass
class MessagePlan:
    """A checked call."""

    call: Call
    chat: ChatPlan
    max_tokens: int

    def message(self, generation: Generation, text: str | None, end: dict[str, Any]) -> dict[str, Any]:
        """The answer as it is now; without `text` it has not begun."""
        return {
            "id": f"msg_{self.call.request_id}",
            "type": "message",
            "role": "assistant",
            "content": [] if text is None else [{"type": "text", "text": text}],
            "model": self.call.model,
            **end,
            "usage": _usage(generation),
        }

    def end(self, news: News, generation: Generation) -> dict[str, Any]:
        """Why the answer ended, if it did."""
        reason, stop = news.piece.finish_reason, news.piece.stop_reason
        if reason is None:
            return dict(_NO_END)
        if isinstance(stop, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        if reason != "length":
            return {"stop_reason": "end_turn", "stop_sequence": None}
        full = generation.usage.completion_tokens < self.max_tokens
        return {"stop_reason": "model_context_window_exceeded" if full else "max_tokens", "stop_sequence": None}


_NO_END = {"stop_reason": None, "stop_sequence": None}


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    cached = sum(usage.cached.values())
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


async def create(http: HttpRequest) -> Any:
    service = service_of(http)
    service.ready()
    body = await parse(http, MessagesBody, service.config.max_request_bytes)
    body.refuse_unbuilt()
    body.refuse()
    chat = body.chat(**body.shared(), max_tokens=body.max_tokens, stop=body.stop_sequences)
    with given_as(_NAMES):
        call = begin(http, service, chat, asked=body)
        plan = MessagePlan(call, await plan_chat(call, chat, fit=True), body.max_tokens)
    if body.stream:
        return stream_answer(call, _events(plan))
    return await whole_answer(http, call, partial(_whole, plan))


async def count_tokens(http: HttpRequest) -> Response:
    service = service_of(http)
    front = service.ready()
    body = await parse(http, CountTokensBody, service.config.max_request_bytes)
    front.check_model(body.model)
    body.refuse_unbuilt()
    with given_as(_NAMES):
        chat = body.chat()
        chat.refuse()
        ids = await encode_chat(front, chat, checked_messages(chat.messages))
    return json_response({"input_tokens": len(ids)}, warning_headers(body.ignored()))


async def _whole(plan: MessagePlan) -> dict[str, Any]:
    generation, text, end = start(plan.call, [plan.chat.job]), "", _NO_END
    async with aclosing(generation.news()) as source:
        async for news in source:
            text += news.piece.text
            end = plan.end(news, generation)
    return {**plan.message(generation, text, end), **times_of(plan.call, generation)}


async def _events(plan: MessagePlan) -> AsyncGenerator[dict[str, Any], None]:
    generation, begun, end = start(plan.call, [plan.chat.job]), False, _NO_END
    async with aclosing(generation.news()) as source:
        async for news in source:
            if not begun:
                begun = True
                yield {"type": "message_start", "message": plan.message(generation, None, _NO_END)}
                yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
                yield {"type": "ping"}
            end = plan.end(news, generation)
            if news.piece.text:
                delta = {"type": "text_delta", "text": news.piece.text}
                yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": end, "usage": _usage(generation)}
    yield {"type": "message_stop", **times_of(plan.call, generation)}


def _system_texts(system: Any) -> list[str]:
    if isinstance(system, str):
        return [system]
    if not isinstance(system, list):
        raise bad_request("system must be a string or a list of text blocks.", "system")
    return [_block_text(block, f"system[{index}]") for index, block in enumerate(system)]


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


def _joined(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    """Texts as the content of a message."""
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _messages(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns as the messages of a chat: what one side says in turns after another is one message, and results of tools
    are messages of their own.

    Raises:
        ApiError: 400 that names the turn or the block.
    """
    messages: list[dict[str, Any]] = []
    for index, turn in enumerate(turns):
        for message in _turn(turn, f"messages[{index}]"):
            role = message["role"]
            if messages and role in ("user", "assistant") and messages[-1]["role"] == role:
                messages[-1]["content"] += message["content"]
                messages[-1]["tool_calls"] += message["tool_calls"]
            else:
                messages.append(message)
    return [_finished(message) for message in messages]


def _turn(turn: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of one turn, each with a list of texts and one of calls."""
    role, content = turn.get("role"), turn.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad_request(f"{where}.role must be user, assistant or system.", f"{where}.role")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a string or a list of blocks.", f"{where}.content")
    found: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("thinking", "redacted_thinking"):
            continue  # models here have not thought it
        if kind == "tool_result" and role == "user":
            found.append(_tool_result(block, place))
            continue
        if not found or found[-1]["role"] != role:
            found.append({"role": role, "content": [], "tool_calls": []})
        if kind == "tool_use" and role == "assistant":
            found[-1]["tool_calls"].append(_tool_call(block, place))
        else:
            found[-1]["content"].append(_block_text(block, place))
    return found or [{"role": role, "content": [], "tool_calls": []}]


def _finished(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a chat has it."""
    calls = message.pop("tool_calls")
    message["content"] = _joined(message["content"])
    return {**message, "tool_calls": calls} if calls else message


def _block_text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise bad_request(f"{where} must be an object with a type.", where)
    if kind != "text":
        raise ApiError(
            400,
            f"{where} is of type {kind[:80]}, which cannot stand here: this model takes text only.",
            param=where,
            code="unsupported_content",
        )
    if not isinstance(block.get("text"), str):
        raise bad_request(f"{where}.text must be a string.", where)
    text: str = block["text"]
    return text


def _tool_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    name, given = block.get("name"), block.get("input")
    if not isinstance(block.get("id"), str) or not isinstance(name, str) or not isinstance(given, dict):
        raise bad_request(f"{where} must have id, name and input, an object.", where)
    arguments = json.dumps(given, ensure_ascii=False)
    return {"id": block["id"], "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool_result(block: dict[str, Any], where: str) -> dict[str, Any]:
    call, content = block.get("tool_use_id"), block.get("content", "")
    if not isinstance(call, str):
        raise bad_request(f"{where}.tool_use_id must be a string.", where)
    if not isinstance(content, (str, list)):
        raise bad_request(f"{where}.content must be a string or a list of text blocks.", where)
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    texts = [_block_text(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
    return {"role": "tool", "tool_call_id": call, "content": texts, "tool_calls": []}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function as a chat describes it."""
    if tool.get("type") not in (None, "custom"):
        raise not_built(where, f"Tools of the server's own (of type {str(tool['type'])[:80]}; functions may be sent)")
    schema = tool.get("input_schema")
    if not isinstance(tool.get("name"), str) or not isinstance(schema, dict):
        raise bad_request(f"{where} must have a name and input_schema, an object.", where)
    about_it = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    return {"type": "function", "function": {"name": tool["name"], **about_it, "parameters": schema}}


def _tool_choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    found = {"auto": "auto", "none": "none", "any": "required"}.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise bad_request(f"tool_choice.type must be auto, none, any or tool, got {str(kind)[:80]!r}.", "tool_choice")
    return found


OPERATIONS = (
    Operation(
        "POST",
        "/v1/messages",
        create,
        "Answer in a conversation, as Anthropic's API does.",
        MessagesAnswer,
        MessagesBody,
        MessagesEvent,
        (400, 404, 408, 413, 500, 503),
        DIALECT,
    ),
    Operation(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        "Tokens of a conversation.",
        TokenCount,
        CountTokensBody,
        errors=(400, 404, 413, 503),
        dialect=DIALECT,
    ),
)
