"""Prompts as callers write them: text, token ids, or a dict with either, alone or in a list."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

MAX_SALT = 128


class _Salted(TypedDict, total=False):
    cache_salt: str
    """Prompts with different salts never share the prefix cache."""


class TextPrompt(_Salted):
    """A prompt to be tokenized."""

    prompt: str


class TokensPrompt(_Salted):
    """A prompt that is tokenized already."""

    prompt_token_ids: list[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt


class Prompt(NamedTuple):
    """One prompt, read: `ids` where the caller gave token ids, else `text` is what to tokenize."""

    text: str | None
    ids: tuple[int, ...] | None
    salt: str = ""


def read_prompts(prompts: PromptType | Sequence[PromptType]) -> list[Prompt]:
    """All prompts of a call, in order. A list of integers is one prompt of token ids.

    Raises:
        ValueError: one is no prompt, or empty; the message has its index.
    """
    if isinstance(prompts, (str, Mapping)) or _is_ids(prompts):
        return [read_prompt(prompts, "the prompt")]
    if not isinstance(prompts, Sequence):
        raise ValueError(f"prompts must be text, token ids, a dict, or a list of these, got {type(prompts).__name__}.")
    return [read_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(prompts)]


def read_prompt(prompt: Any, name: str) -> Prompt:
    """One prompt; `name` is what to call it in an error. Whether an empty text is a prompt is for the tokenizer to say:
    it is where the model wants BOS before every text."""
    if isinstance(prompt, str):
        return Prompt(prompt, None)
    if not isinstance(prompt, Mapping):
        return Prompt(None, _ids(prompt, name))
    unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
    if unknown:
        raise ValueError(
            f"{name} has {', '.join(sorted(map(str, unknown)))}: a prompt is made of prompt or "
            "prompt_token_ids, and cache_salt. Other inputs than text are not built yet."
        )
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str) or len(salt) > MAX_SALT:
        raise ValueError(f"cache_salt of {name} must be text of at most {MAX_SALT} characters.")
    if prompt.get("prompt_token_ids") is not None:
        return Prompt(prompt.get("prompt"), _ids(prompt["prompt_token_ids"], name), salt)
    text = prompt.get("prompt")
    if not isinstance(text, str):
        raise ValueError(f"{name} must have text as its prompt, or prompt_token_ids, got {text!r}.")
    return Prompt(text, None, salt)


def _is_ids(value: Any) -> bool:
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], int)


def _ids(value: Any, name: str) -> tuple[int, ...]:
    try:
        if any(isinstance(token, bool) for token in value):
            raise TypeError("true and false are no token ids")
        ids = tuple(operator.index(token) for token in value)
    except TypeError as error:
        raise ValueError(f"{name} must be text, a list of token ids, or a dict with either: {error}.") from None
    if not ids:
        raise ValueError(f"The decoder prompt cannot be empty: {name} has no tokens.")
    return ids
