"""Chat messages to prompt text, by the model's own template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.text.sandbox import ChatEnvironment
from octavo.text.sandbox import TemplateError as TemplateError
from octavo.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_PROBE = "octavo probe"
_PRIVATE = range(0xE000, 0xF8FF)
_TOO_DEEP = "the messages, tools or variables of the chat are nested too deeply"
PARAMETERS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""What `render` gives to a template itself; no variable may have one of these names."""


def load_template(text_or_path: str) -> str:
    """The template in a file of that name, or the argument itself where it is a template.

    TemplateError when it looks like a file name and there is no such file, or it cannot be read.
    """
    if "\n" in text_or_path or "{" in text_or_path:
        return text_or_path
    try:
        path = Path(text_or_path).expanduser()
        if path.is_file():
            return path.read_text("utf-8")
    except (OSError, RuntimeError, UnicodeError) as error:
        raise TemplateError(f"the chat template {text_or_path!r} cannot be read: {error}") from None
    raise TemplateError(
        f"the chat template {text_or_path!r} is neither a file nor a template: a template holds {{{{ or {{%."
    )


class Sandbox(Protocol):
    """Runs templates that may be anybody's; raises TemplateError where one is not to be read or run."""

    def read(self, source: str) -> Any:
        """The template, ready to run."""

    def run(self, template: Any, variables: dict[str, Any]) -> str:
        """The rendered text."""


class ChatTemplate:
    """A chat template, ready to render.

    `content_format` is "string" for templates that print a message's content and "openai" for those that loop over
    its parts; it is found by trying.
    """

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        content_format: str = "auto",
        sandbox: Sandbox | None = None,
    ) -> None:
        """`source`: the template, or several by name ("default"; "tool_use" is taken when tools are given);
        `sandbox`: where it runs.

        Raises:
            TemplateError: a syntax error in a template, or an unknown `content_format`.
        """
        named = {"default": source} if isinstance(source, str) else dict(source or {})
        if content_format not in ("auto", "string", "openai"):
            raise TemplateError(f"chat template content format {content_format!r} is not auto, string or openai")
        self._sandbox = sandbox or ChatEnvironment()
        self._special_tokens = dict(special_tokens or {})
        self._templates = {name: self._sandbox.read(text) for name, text in named.items()}
        self._formats = dict.fromkeys(self._templates, content_format)

    @classmethod
    def of(cls, tokenizer: Tokenizer, override: str | None = None, content_format: str = "auto") -> ChatTemplate:
        """The tokenizer's template, or `override` in its place, with the tokenizer's special tokens."""
        return cls(override or tokenizer.chat_templates, tokenizer.special_tokens, content_format)

    def __bool__(self) -> bool:
        return bool(self._templates)

    def content_format(self, tools: Any = None) -> str:
        """ "string" or "openai", of the template that would be used."""
        name = self._choose(tools)
        if self._formats[name] == "auto":
            self._formats[name] = self._detect(self._templates[name])
        return self._formats[name]

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. It holds its own special tokens: encode it without adding any.

        Args:
            add_generation_prompt: end with the opening of the assistant's turn.
            continue_final_message: end inside the last message instead, so that the model goes on with it.
            variables: further variables for the template, of any name but those of the parameters.

        Raises:
            TemplateError: no template, a wrong combination or message, or an error in or raised by the template.
        """
        if add_generation_prompt and continue_final_message:
            raise TemplateError(
                "add_generation_prompt and continue_final_message cannot both be true: set add_generation_prompt to "
                "false to continue the last message."
            )
        for name in sorted(PARAMETERS & (variables or {}).keys()):
            raise TemplateError(f"the variables of a chat template cannot set {name}, which is a parameter of its own.")
        name = self._choose(tools)
        if not messages:
            raise TemplateError("messages is empty: a chat needs at least one message.")
        texts_only = all(isinstance(message, dict) and isinstance(message.get("content"), str) for message in messages)
        style = "string" if texts_only else self.content_format(tools)
        prepared = [_prepare(message, style) for message in messages]
        end = _unused_character(messages) if continue_final_message else ""
        if end:
            prepared[-1] = _append(prepared[-1], end)
        text = self._sandbox.run(
            self._templates[name],
            {
                **self._special_tokens,
                **(variables or {}),
                "messages": prepared,
                "tools": list(tools) if tools else None,
                "documents": list(documents) if documents else None,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if not end:
            return text
        if end not in text:
            raise TemplateError(
                "the chat template does not render the last message's content, so it cannot be continued."
            )
        return text[: text.rindex(end)].replace(end, "")

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        parse_special: bool = True,
        most_characters: int | None = None,
        **options: Any,
    ) -> list[int]:
        """`render`, then token ids, without special tokens beside the template's own.

        With `parse_special` False control tokens spelled out in messages stay plain text: only those that the
        template itself writes become control tokens, so no user can forge a turn. A text of more than
        `most_characters` is refused: tokenizing takes long, and a hundred times the memory.
        """
        if parse_special:
            text = _fitting(self.render(messages, **options), most_characters)
            return tokenizer.encode(text, add_special_tokens=False)
        pattern = tokenizer.control_pattern
        mark = _unused_character(messages, options)
        try:
            broken = [_break_up_joints(_break_up(message, pattern, mark), pattern, mark) for message in messages]
            options = {key: _break_up(value, pattern, mark) for key, value in options.items()}
        except RecursionError:
            raise TemplateError(_TOO_DEEP) from None
        return tokenizer.encode_marked(_fitting(self.render(broken, **options), most_characters), mark)

    def _choose(self, tools: Any) -> str:
        if tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        if not self._templates:
            raise TemplateError(
                "this model has no chat template: pass one with --chat-template, or use completions with a plain "
                "prompt."
            )
        names = ", ".join(sorted(self._templates))
        raise TemplateError(f"this model has no default chat template (it has {names}): pass one with --chat-template.")

    def _detect(self, template: Any) -> str:
        """Whether the template takes a list of parts: it then prints their texts and not the list itself."""
        probe = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._sandbox.run(
                template, {**self._special_tokens, "messages": [probe], "add_generation_prompt": False, "tools": None}
            )
        except TemplateError:
            return "string"
        return "openai" if _PROBE in text and "'type'" not in text and '"type"' not in text else "string"


def _fitting(text: str, most: int | None) -> str:
    if most is not None and len(text) > most:
        raise TemplateError(
            f"the chat template renders {len(text)} characters, more than can fit in the context length of the model. "
            "Please shorten the messages."
        )
    return text


def _prepare(message: Message, style: str) -> dict[str, Any]:
    """One message as templates want it."""
    if (
        type(message) is dict
        and type(message.get("role")) is str
        and type(message.get("content")) is str
        and "tool_calls" not in message
        and None not in message.values()
    ):
        return message  # no template can change it
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError("each message must be an object with a role.")
    prepared = {key: value for key, value in message.items() if value is not None}
    content = prepared.get("content", "")
    if isinstance(content, str):
        prepared["content"] = content
    elif isinstance(content, Sequence):
        parts = [_text_part(part) for part in content]
        prepared["content"] = (
            "\n".join(parts) if style == "string" else [{"type": "text", "text": part} for part in parts]
        )
    else:
        raise TemplateError(f"message content must be a string or a list of parts, not {type(content).__name__}.")
    calls = prepared.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise TemplateError("tool_calls must be a list of objects.")
        prepared["tool_calls"] = [_prepare_call(call) for call in calls]
    return prepared


def _text_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise TemplateError(f"content part type {kind!r} is not supported by this model: it takes text parts only.")
    text = part.get(field)
    if not isinstance(text, str):
        raise TemplateError(f"a content part of type {kind!r} must have a string in {field!r}.")
    return text


def _prepare_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call whose arguments are an object: OpenAI sends them as a JSON string, templates print them as JSON."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    elif isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _append(message: dict[str, Any], end: str) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + end}
    if not content:
        return {**message, "content": [{"type": "text", "text": end}]}
    last = {**content[-1], "text": content[-1]["text"] + end}
    return {**message, "content": [*content[:-1], last]}


def _unused_character(*values: Any) -> str:
    """A private-use character that stands nowhere in the texts of `values`."""
    texts = texts_in(values)
    for code in _PRIVATE:
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise TemplateError("the messages use every private-use character there is")


def texts_in(value: Any) -> list[str]:
    """All texts inside `value`, which is made as JSON is: keys too, each of them once."""
    found: list[str] = []
    keys: set[Any] = set()
    rest = [value]
    while rest:
        item = rest.pop()
        if isinstance(item, str):
            found.append(item)
        elif type(item) is dict or isinstance(item, Mapping):
            keys.update(item)
            for inner in item.values():
                (found if type(inner) is str else rest).append(inner)
        elif isinstance(item, list | tuple):
            rest += item
    return [*found, *(key for key in keys if isinstance(key, str))]


def joined_parts(messages: Iterable[Any]) -> list[str]:
    """Per message with parts their texts in one, as a template prints them that puts nothing in between."""
    return ["".join(_part_texts(message)) for message in messages if _has_parts(message)]


def _has_parts(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("content"), list)


def _part_texts(message: Mapping[str, Any]) -> list[str]:
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in message["content"])
    return [text for text in texts if isinstance(text, str)]


def _break_up_joints(message: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """`message` with `mark` after each of its parts where one begins a control token that another goes on with."""
    if not _has_parts(message) or not pattern.search("".join(_part_texts(message))):
        return message
    return {**message, "content": [_marked_end(part, mark) for part in message["content"]]}


def _marked_end(part: Any, mark: str) -> Any:
    if isinstance(part, str):
        return part + mark
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": part["text"] + mark}
    return part


def _break_up(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """`value` with `mark` put inside every control token spelled out in one of its strings."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_break_up(key, pattern, mark): _break_up(item, pattern, mark) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_break_up(item, pattern, mark) for item in value]
    return value
