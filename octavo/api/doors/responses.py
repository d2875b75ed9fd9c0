"""OpenAI's /v1/responses: items in, items on; answers can be kept, asked for again, and gone on from.

Only text is there: messages in and one message out. Calls of tools stay in its text, as in a chat.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.api.answers import Answer, ChatTokenWithRivals, Times
from octavo.api.body import parse
from octavo.api.call import Call, begin, start, stream_answer, times_of, whole_answer
from octavo.api.chat import ChatPlan, plan_chat
from octavo.api.dialect import Dialect, named_frame
from octavo.api.errors import ApiError, bad_request, given_as, not_built
from octavo.api.frontend import Service, service_of
from octavo.api.generation import Generation, News
from octavo.api.logprobs import chat_entries
from octavo.api.messages import checked_messages
from octavo.api.middleware import explain, key_of
from octavo.api.models import json_response
from octavo.api.openapi import Operation
from octavo.api.prompts import encode_chat
from octavo.api.schemas import ChatBody, Ignored, Nested, SamplingBody, about
from octavo.api.stored import Stored

DIALECT = Dialect(event=named_frame)
_NAMES = {
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = frozenset(
    {
        _LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_MOST_ITEMS = 100
"""Items in one page of a list."""


class TextConfig(Nested):
    """The form of the answer."""

    format: Annotated[dict[str, Any] | None, about('{"type": "text"} only, so far.')] = None


class Reasoning(Nested):
    """How much to think."""

    effort: Annotated[str | None, about("The variable reasoning_effort of the chat template.")] = None


class ResponsesBody(SamplingBody):
    """POST /v1/responses."""

    not_built = {
        "background": ((False,), "Answering after the connection is closed"),
        "conversation": ((), "Keeping of conversations (previous_response_id goes on from an answer)"),
        "prompt": ((), "Keeping of prompt templates"),
    }
    without_effect = {
        **SamplingBody.without_effect,
        "max_tool_calls": ((), "no tools are called here"),
        "stream_options": (
            ({}, {"include_obfuscation": False}),
            "events carry the text and nothing that hides its size",
        ),
    }

    input: Annotated[
        Any,
        WithJsonSchema(
            {
                "description": "What the user says, or a list of items: messages, calls of functions and their output.",
                "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}],
            }
        ),
    ]
    instructions: Annotated[str | None, about("A system message before all others, for this answer only.")] = None
    previous_response_id: Annotated[str | None, about("The answer to go on from.")] = None
    max_output_tokens: Annotated[int | None, about("Most tokens of the answer.", minimum=1)] = None
    stop: Annotated[str | list[str] | None, about("Texts that end the answer.")] = None
    store: Annotated[bool | None, about("Keep the answer. Default: true.")] = None
    metadata: Annotated[dict[str, str] | None, about("Comes back with the answer.")] = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None, about("auto leaves out the oldest turns of what is too long.")
    ] = None
    text: Annotated[TextConfig | None, about("The form of the answer.")] = None
    reasoning: Annotated[Reasoning | None, about("For the chat template.")] = None
    tools: Annotated[list[dict[str, Any]] | None, about("Functions, for the chat template.")] = None
    tool_choice: Annotated[str | dict[str, Any] | None, about("none or auto; forcing a call is not built.")] = None
    include: Annotated[list[str] | None, about(f"{_LOGPROBS} adds logprobs.")] = None
    top_logprobs: int | None = Field(default=None, ge=0, description="Logprobs, with so many of the others.")
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables for the chat template.")] = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def refuse(self) -> None:
        super().refuse()
        self.refuse_unbuilt()
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise bad_request(f"include does not know {name[:80]!r}; {_LOGPROBS} adds logprobs.", "include")

    def ignored(self) -> list[Ignored]:
        found = super().ignored()
        absent = [name for name in self.include or () if name != _LOGPROBS]
        if absent:
            found.append(Ignored("include", f"The field `include` names what no answer here has: {', '.join(absent)}."))
        return found


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ChatTokenWithRivals] = []


class OutputMessage(Answer):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class InputTokensDetails(Answer):
    cached_tokens: Annotated[int, Field(description="Input tokens that did not have to be computed again.")]


class OutputTokensDetails(Answer):
    reasoning_tokens: Annotated[int, Field(description="Always 0: reasoning is not separated from the answer.")]


class ResponsesUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesAnswer(Answer):
    """The answer, and what was asked for."""

    id: str
    object: Literal["response"]
    created_at: Annotated[int, Field(description="Seconds since 1970.")]
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: Literal[True]
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponsesUsage | None
    metrics: Times | None = None


class ResponsesEvent(Answer):
    """One event of a streamed answer; which fields there are depends on its type."""

    type: str
    sequence_number: int
    response: ResponsesAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputMessage | None = None
    part: OutputText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[ChatTokenWithRivals] = []


class ResponsesDeleted(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponsesItems(Answer):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclass
class ResponsePlan:
    """A checked call."""

    call: Call
    body: ResponsesBody
    chat: ChatPlan
    items: list[dict[str, Any]]
    """What was asked, without what came before."""
    id: str
    """Names what is kept, so it is new, whatever the caller calls the request."""
    message_id: str

    def answer(self, status: str, output: Sequence[dict[str, Any]] = (), **fields: Any) -> dict[str, Any]:
        """The answer as it is now; `fields` say more of it."""
        body, sampling = self.body, self.chat.job.request.sampling
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.call.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.call.model,
            "output": list(output),
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": self.chat.top,
            "top_p": sampling.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
            **fields,
        }


class Said:
    """The message of an answer, as it grows."""

    def __init__(self, plan: ResponsePlan) -> None:
        self._plan = plan
        self.text = ""
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def add(self, news: News) -> list[dict[str, Any]]:
        """Take what came; the logprobs that came with it."""
        self.text += news.piece.text
        self.finish_reason = news.piece.finish_reason
        if not self._plan.body.wants_logprobs:
            return []
        found = chat_entries(news.piece.logprobs or (), self._plan.chat.top, self._plan.call.names())
        self.logprobs += found
        return found

    @property
    def status(self) -> str:
        return "incomplete" if self.finish_reason in (None, "length") else "completed"

    def part(self) -> dict[str, Any]:
        return _output_text(self.text, self.logprobs)

    def message(self) -> dict[str, Any]:
        return _message(self._plan, self.status, [self.part()])

    def answer(self, generation: Generation) -> dict[str, Any]:
        """The whole answer, which is kept where the caller wants it."""
        reason = {"reason": "max_output_tokens"} if self.status == "incomplete" else None
        return _kept(
            self._plan,
            self._plan.answer(
                self.status,
                [self.message()],
                incomplete_details=reason,
                usage=_usage(generation),
                **times_of(self._plan.call, generation),
            ),
        )


def _output_text(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message(plan: ResponsePlan, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "message", "id": plan.message_id, "role": "assistant", "status": status, "content": content}


def _usage(generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": sum(usage.cached.values())},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _kept(plan: ResponsePlan, answer: dict[str, Any]) -> dict[str, Any]:
    """`answer`, which is stored unless the caller does not want it."""
    if answer["store"]:
        asked, told = msgspec.json.encode(plan.items), msgspec.json.encode(answer)
        plan.call.service.stored.put(plan.id, Stored(plan.call.key, plan.body.previous_response_id, asked, told))
    return answer


async def create(http: HttpRequest) -> Any:
    service = service_of(http)
    service.ready()
    body = await parse(http, ResponsesBody, service.config.max_request_bytes)
    body.refuse()
    items = _items(body.input)
    known = _known(service, body.previous_response_id, key_of(http.scope))
    with given_as(_NAMES):
        translated = _chat_body(body, [*known, *items])
        call = begin(http, service, translated, asked=body)
        if body.truncation == "auto":
            translated.messages = await _fitting(call, translated)
        chat = await plan_chat(call, translated)
    plan = ResponsePlan(call, body, chat, items, _new_id("resp"), _new_id("msg"))
    if body.stream:
        return stream_answer(call, _events(plan))
    return await whole_answer(http, call, partial(_whole, plan))


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


async def _whole(plan: ResponsePlan) -> dict[str, Any]:
    generation, said = start(plan.call, [plan.chat.job]), Said(plan)
    async with aclosing(generation.news()) as source:
        async for news in source:
            said.add(news)
    return said.answer(generation)


async def _events(plan: ResponsePlan) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a stream. Whatever goes wrong before the first of them is an ordinary error."""
    generation, said, numbers = start(plan.call, [plan.chat.job]), Said(plan), itertools.count()

    def event(kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}

    item: dict[str, Any] = {"output_index": 0}
    part = {"item_id": plan.message_id, "output_index": 0, "content_index": 0}
    begun = False
    try:
        async with aclosing(generation.news()) as source:
            async for news in source:
                if not begun:
                    begun = True
                    yield event("created", response=plan.answer("in_progress"))
                    yield event("in_progress", response=plan.answer("in_progress"))
                    yield event("output_item.added", **item, item=_message(plan, "in_progress", []))
                    yield event("content_part.added", **part, part=_output_text("", []))
                logprobs = said.add(news)
                if news.piece.text or logprobs:
                    yield event("output_text.delta", **part, delta=news.piece.text, logprobs=logprobs)
    except Exception as error:
        if not begun:
            raise
        yield event("failed", response=_failed(plan, said, generation, explain(error)))
        return
    answer = said.answer(generation)
    yield event("output_text.done", **part, text=said.text, logprobs=said.logprobs)
    yield event("content_part.done", **part, part=said.part())
    yield event("output_item.done", **item, item=said.message())
    yield event(said.status, response=answer)


def _failed(plan: ResponsePlan, said: Said, generation: Generation, problem: ApiError) -> dict[str, Any]:
    told = {"code": "server_error", "message": problem.message}
    return _kept(plan, plan.answer("failed", [said.message()], error=told, usage=_usage(generation)))


def _items(given: Any) -> list[dict[str, Any]]:
    """The input as full items, as a list of them is answered.

    Raises:
        ApiError: 400 that names the item.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise bad_request("input must be a string or a list of items.", "input")
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def _item(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise bad_request(f"{where} must be an object.", where)
    kind = item.get("type") or "message"
    make = _ITEMS.get(kind) if isinstance(kind, str) else None
    if make is None:
        raise ApiError(
            400,
            f"{where}.type must be one of {', '.join(_ITEMS)} here, got {str(kind)[:80]!r}; leave the item out.",
            param=f"{where}.type",
            code="unsupported_content",
        )
    return make(item, where)


def _message_item(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(_ROLES)}.", f"{where}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    texts = _texts(item.get("content"), f"{where}.content")
    content = [{"type": kind, "text": text, **({"annotations": []} if role == "assistant" else {})} for text in texts]
    return {"type": "message", "id": _id(item, "msg"), "role": role, "status": "completed", "content": content}


def _call_item(item: dict[str, Any], where: str) -> dict[str, Any]:
    texts = {name: _text(item.get(name), f"{where}.{name}") for name in ("call_id", "name", "arguments")}
    return {"type": "function_call", "id": _id(item, "fc"), "status": "completed", **texts}


def _output_item(item: dict[str, Any], where: str) -> dict[str, Any]:
    call = _text(item.get("call_id"), f"{where}.call_id")
    output = "\n".join(_texts(item.get("output"), f"{where}.output"))
    fields = {"id": _id(item, "fco"), "status": "completed", "call_id": call, "output": output}
    return {"type": "function_call_output", **fields}


_ITEMS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "message": _message_item,
    "function_call": _call_item,
    "function_call_output": _output_item,
}


def _id(item: dict[str, Any], kind: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and given else _new_id(kind)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise bad_request(f"{where} must be a string.", where)
    return value


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a string or of a list of parts."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts.", where)
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise bad_request(f"{where} must be an object with a type.", where)
    if kind == "refusal":
        return _text(part.get("refusal"), f"{where}.refusal")
    if kind in _TEXT_PARTS:
        return _text(part.get("text"), f"{where}.text")
    raise ApiError(
        400,
        f"{where} is of type {kind[:80]}, but this model takes text only: input_text.",
        param=where,
        code="unsupported_content",
    )


def _known(service: Service, previous: str | None, owner: int | None) -> list[dict[str, Any]]:
    """The items of the conversation that is gone on with.

    Raises:
        ApiError: 404 where it is not there.
    """
    if previous is None:
        return []
    try:
        turns = service.stored.conversation(previous, owner)
    except KeyError as missing:
        raise _not_found(str(missing.args[0]), "previous_response_id", "previous_response_not_found") from None
    return [item for turn in turns for item in _turn(turn)]


def _turn(turn: Stored) -> list[dict[str, Any]]:
    """What was asked, and what was answered."""
    items: list[dict[str, Any]] = msgspec.json.decode(turn.asked)
    return [*items, *msgspec.json.decode(turn.answer)["output"]]


def _not_found(name: str, param: str, code: str) -> ApiError:
    return ApiError(
        404,
        f"There is no answer `{name}` here. The server has them in its memory: not those with store: false, not those "
        "deleted, not the least recently used ones when there are too many, and none from before it was started.",
        param=param,
        code=code,
    )


def _chat_body(body: ResponsesBody, items: Sequence[dict[str, Any]]) -> ChatBody:
    """The same as a chat."""
    messages = _messages(items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    return ChatBody(
        **body.shared(),
        messages=messages,
        max_tokens=body.max_output_tokens,
        stop=body.stop,
        logprobs=True if body.wants_logprobs else None,
        top_logprobs=(body.top_logprobs or 0) if body.wants_logprobs else None,
        response_format=body.text.format if body.text else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as the messages of a chat. Calls belong to the assistant's message before them, where there is one."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if item["type"] == "message":
            texts = [part["text"] for part in item["content"]]
            content = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
            messages.append({"role": item["role"], "content": content})
        elif item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function as a chat describes it."""
    if tool.get("type") != "function":
        raise not_built(
            where, f"Tools of the server's own (of type {str(tool.get('type'))[:80]}; functions may be sent)"
        )
    if not isinstance(tool.get("name"), str):
        raise bad_request(f"{where}.name must be a string.", f"{where}.name")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        raise not_built("tool_choice", "Choosing among tools")
    return {"type": "function", "function": {"name": choice.get("name")}}


async def _fitting(call: Call, body: ChatBody) -> list[dict[str, Any]]:
    """The messages without as many of the oldest turns as must go for the rest, and the answer, to fit.

    System messages at the beginning stay, and what is kept begins with a message of the user.
    """
    messages = body.messages
    head = next((at for at, message in enumerate(messages) if message["role"] not in ("system", "developer")), 0)
    starts = [head, *(at for at in range(head + 1, len(messages)) if messages[at]["role"] == "user")]
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        if await _fits(call, body, [*messages[:head], *messages[starts[middle] :]]):
            high = middle
        else:
            low = middle + 1
    return [*messages[:head], *messages[starts[low] :]]


async def _fits(call: Call, body: ChatBody, messages: list[dict[str, Any]]) -> bool:
    try:
        ids = await encode_chat(call.front, body, checked_messages(messages))
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return False
    return len(ids) + (body.max_tokens or 1) <= call.front.info.max_model_len


def _stored(http: HttpRequest) -> tuple[str, Stored]:
    """The answer that a path names.

    Raises:
        ApiError: 404 where there is none of the caller's.
    """
    name: str = http.path_params["response_id"]
    found = service_of(http).stored.get(name, key_of(http.scope))
    if found is None:
        raise _not_found(name[:200], "response_id", "response_not_found")
    return name, found


async def retrieve(http: HttpRequest) -> Response:
    _, found = _stored(http)
    if http.query_params.get("stream", "false") != "false":
        raise not_built("stream", "Streaming of an answer again")
    return Response(found.answer, media_type="application/json")


async def delete(http: HttpRequest) -> Response:
    name, _ = _stored(http)
    service_of(http).stored.remove(name, key_of(http.scope))
    return json_response({"id": name, "object": "response", "deleted": True})


async def cancel(http: HttpRequest) -> Response:
    _stored(http)
    raise bad_request(
        "The answer has ended; close the connection to end one that is being generated. (Only answers in the "
        "background can be cancelled, and those are not built.)",
        "response_id",
    )


async def input_items(http: HttpRequest) -> Response:
    """What the answer was made from, the conversation before it included; newest first, unless told otherwise."""
    name, found = _stored(http)
    items: list[dict[str, Any]] = msgspec.json.decode(found.asked)
    if found.previous is not None:
        items = [*_known(service_of(http), found.previous, key_of(http.scope)), *items]
    order, limit = http.query_params.get("order", "desc"), http.query_params.get("limit", "20")
    if order not in ("asc", "desc"):
        raise bad_request(f"order must be asc or desc, got {order[:20]!r}.", "order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MOST_ITEMS):
        raise bad_request(f"limit must be a number from 1 to {_MOST_ITEMS}, got {limit[:20]!r}.", "limit")
    items = items if order == "asc" else items[::-1]
    after = http.query_params.get("after")
    if after is not None:
        places = [at for at, item in enumerate(items) if item["id"] == after]
        if not places:
            raise bad_request(f"after names no item of `{name}`: {after[:80]!r}.", "after")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    more = len(items) > len(page)
    return json_response({"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more})


OPERATIONS = (
    Operation(
        "POST",
        "/v1/responses",
        create,
        "Answer in a conversation that the server may keep.",
        ResponsesAnswer,
        ResponsesBody,
        ResponsesEvent,
        (400, 404, 408, 413, 500, 503),
        DIALECT,
    ),
    Operation(
        "GET",
        "/v1/responses/{response_id}",
        retrieve,
        "An answer that was kept.",
        ResponsesAnswer,
        errors=(400, 404),
        query=(("stream", {"const": "false"}),),
    ),
    Operation("DELETE", "/v1/responses/{response_id}", delete, "Forget an answer.", ResponsesDeleted, errors=(404,)),
    Operation(
        "GET",
        "/v1/responses/{response_id}/input_items",
        input_items,
        "What an answer was made from.",
        ResponsesItems,
        errors=(400, 404),
        query=(
            ("order", {"enum": ["asc", "desc"]}),
            ("limit", {"type": "integer", "minimum": 1, "maximum": _MOST_ITEMS}),
            ("after", {"type": "string"}),
        ),
    ),
    Operation(
        "POST",
        "/v1/responses/{response_id}/cancel",
        cancel,
        "Refused: an answer ends with its connection.",
        ResponsesAnswer,
        errors=(400, 404),
    ),
)
