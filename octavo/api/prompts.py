"""Text and messages to token ids, without holding up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from octavo.api.errors import bad_request
from octavo.api.frontend import Frontend
from octavo.api.schemas import ChatBody, TokenizeBody
from octavo.text.template import PARAMETERS, ChatTemplate, joined_parts, texts_in

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LARGE = 20_000
"""Inputs of more characters than this are worked on beside the event loop."""


async def beside(size: int, function: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """`function(...)`, on a thread when `size` says that it takes long."""
    if size <= _LARGE:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


async def encode_text(front: Frontend, text: str, special: bool) -> list[int]:
    """Token ids of plain text; `special`: with BOS or EOS where the model wants them."""
    return await beside(len(text), front.tokenizer.encode, text, add_special_tokens=special)


async def encode_chat(front: Frontend, body: ChatBody | TokenizeBody, messages: Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a conversation, as the model's chat template has it.

    Control tokens that somebody typed in a message stay plain text, so that nobody can forge a turn.

    Raises:
        ApiError: no template, or one that is not allowed.
        TemplateError: the template refuses the messages.
    """
    return await _with_template(_encode, front, body, messages)


async def render_chat(front: Frontend, body: ChatBody | TokenizeBody, messages: Sequence[dict[str, Any]]) -> str:
    """The text of a conversation, as the model's chat template has it.

    Raises as `encode_chat`.
    """
    return await _with_template(_render, front, body, messages)


async def _with_template(
    work: Callable[[Frontend, str | None, Sequence[dict[str, Any]], dict[str, Any], Sequence[str]], _R],
    front: Frontend,
    body: ChatBody | TokenizeBody,
    messages: Sequence[dict[str, Any]],
) -> _R:
    """`work` with the template of `body`, the messages, the template's options, and all that the caller wrote."""
    options = _options(front, body)
    texts = [*texts_in(messages), *texts_in(options)]
    characters = sum(map(len, texts))
    _check_size(front, characters)
    own = body.chat_template
    if own is not None:  # reading it may take long, and what it does may, however short it is
        waiting = partial(work, front, own, messages, options, texts)
        return await front.callers.use(waiting)
    return await beside(characters, work, front, own, messages, options, texts)


def _encode(
    front: Frontend,
    own: str | None,
    messages: Sequence[dict[str, Any]],
    options: dict[str, Any],
    texts: Sequence[str],
) -> list[int]:
    template = _template(front, own)
    typed = front.tokenizer.control_pattern.search("\0".join([*texts, *joined_parts(messages)])) is not None
    return template.encode(
        front.tokenizer,
        messages,
        parse_special=not typed,
        most_characters=front.factory.most_characters,
        **options,
    )


def _render(
    front: Frontend,
    own: str | None,
    messages: Sequence[dict[str, Any]],
    options: dict[str, Any],
    texts: Sequence[str],
) -> str:
    return _template(front, own).render(messages, **options)


def _template(front: Frontend, own: str | None) -> ChatTemplate:
    if own is None:
        if not front.template:
            raise bad_request(
                "This model has no chat template: use /v1/completions, or start the server with --chat-template.",
                "messages",
            )
        return front.template
    if not front.config.trust_request_chat_template:
        raise bad_request(
            "chat_template in a request is not allowed here; the server must be started with "
            "--trust-request-chat-template.",
            "chat_template",
        )
    tokens = tuple(front.tokenizer.special_tokens.items())
    return front.callers.read(own, tokens, front.config.chat_template_content_format)


def _options(front: Frontend, body: ChatBody | TokenizeBody) -> dict[str, Any]:
    asked = body.chat_template_kwargs or {}
    for name in sorted(PARAMETERS & asked.keys()):
        raise bad_request(f"chat_template_kwargs cannot set {name}; it has a field of its own.", "chat_template_kwargs")
    variables = dict(front.config.default_chat_template_kwargs)
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    variables.update(asked)
    documents = body.documents if isinstance(body, ChatBody) else None
    go_on = bool(body.continue_final_message)
    prompt = not go_on if body.add_generation_prompt is None else body.add_generation_prompt
    return {
        "tools": body.tools or None,
        "documents": documents or None,
        "add_generation_prompt": prompt,
        "continue_final_message": go_on,
        "variables": variables,
    }


def _check_size(front: Frontend, characters: int) -> None:
    """Refuse at once what could only be refused after minutes of tokenizing."""
    if characters > front.factory.most_characters:
        raise bad_request(
            f"This model's maximum context length is {front.info.max_model_len} tokens. However, the messages have "
            f"{characters} characters, more than can fit. Please shorten them.",
            "messages",
            "context_length_exceeded",
        )
