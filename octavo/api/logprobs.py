"""Logprobs in the two layouts of OpenAI and the one of vLLM, from the engine's `TokenLogprobs`."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import Any

from octavo.types import TokenLogprobs

LEAST_LOGPROB = -9999.0
"""JSON has no -inf; a token that cannot be drawn is given this, as vLLM does."""


def finite(logprob: float) -> float:
    """`logprob` as a number JSON can hold."""
    return max(logprob, LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB


def best(entry: TokenLogprobs, top: int) -> tuple[tuple[int, float], ...]:
    """The `top` most probable tokens of `entry`; -1 means all there are."""
    return entry.top if top == -1 else entry.top[:top]


class TokenNames:
    """How a token is written in an answer: `token_bytes(id)` are its bytes, `hidden` those that add nothing to the
    text."""

    def __init__(self, token_bytes: Callable[[int], bytes], hidden: Container[int], as_ids: bool) -> None:
        self._bytes = token_bytes
        self._hidden = hidden
        self._as_ids = as_ids

    def bytes(self, token: int) -> bytes:
        """What the token adds to the text."""
        return b"" if token in self._hidden else self._bytes(token)

    def text(self, token: int) -> str:
        """The token's text; part of a character is written `bytes:\\xf0\\x9f`, so that different tokens differ."""
        if self._as_ids:
            return f"token_id:{token}"
        raw = self._bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_entries(entries: Sequence[TokenLogprobs], top: int, names: TokenNames) -> list[dict[str, Any]]:
    """`choices[].logprobs.content` of the chat API: one entry per token."""
    return [
        {
            **_chat_token(entry.token, entry.logprob, names),
            "top_logprobs": [_chat_token(token, logprob, names) for token, logprob in best(entry, top)],
        }
        for entry in entries
    ]


def _chat_token(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.text(token), "logprob": finite(logprob), "bytes": list(names.bytes(token))}


class CompletionLogprobs:
    """`choices[].logprobs` of the completions API for one choice, part by part: offsets run on from call to call."""

    def __init__(self, top: int, names: TokenNames) -> None:
        self._top = top
        self._names = names
        self._offset = 0

    def part(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The layout for the next `tokens`; an entry is None where there is no score (the first prompt token)."""
        texts: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float] | None] = []
        for token, entry in zip(tokens, entries, strict=True):
            texts.append(self._names.text(token))
            offsets.append(self._offset)
            tops.append(None if entry is None else self._best(entry))
            # A character is counted where its first byte stands, whichever token brings the rest of it.
            self._offset += sum(byte & 0xC0 != 0x80 for byte in self._names.bytes(token))
        scores = [None if entry is None else finite(entry.logprob) for entry in entries]
        return {"text_offset": offsets, "token_logprobs": scores, "tokens": texts, "top_logprobs": tops}

    def _best(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most probable tokens, the token itself always among them. Two tokens of the same text share a key; the
        more probable one keeps it."""
        found: dict[str, float] = {}
        for token, logprob in (*best(entry, self._top), (entry.token, entry.logprob)):
            found.setdefault(self._names.text(token), finite(logprob))
        return found


def prompt_entries(entries: Sequence[TokenLogprobs | None], top: int, names: TokenNames) -> list[Any]:
    """vLLM's `prompt_logprobs`: per prompt token None or {token id: {logprob, rank, decoded_token}}."""
    return [None if entry is None else _ranked(entry, top, names) for entry in entries]


def _ranked(entry: TokenLogprobs, top: int, names: TokenNames) -> dict[str, Any]:
    ranks = [(token, logprob, rank) for rank, (token, logprob) in enumerate(best(entry, top), 1)]
    found: dict[str, Any] = {}
    for token, logprob, rank in ((entry.token, entry.logprob, entry.rank), *ranks):
        found.setdefault(str(token), {"logprob": finite(logprob), "rank": rank, "decoded_token": names.text(token)})
    return found
