"""From tokens that arrive a few at a time to text that is never taken back."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Sequence

from octavo.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_TAIL = 8
"""Prompt tokens looked at for what they leave open: a character has four bytes, and some tokens have none."""


class Detokenizer:
    """The text of one sequence, token by token.

    Everything `push` returned, then what `finish` returns, joined to the text of the prompt is
    `tokenizer.decode(prompt_ids + all ids)`, however the ids were cut into calls. No part of a character is returned
    before the whole is there; bytes that are no UTF-8 become U+FFFD. The cost of a call does not grow with what came
    before.

    (A prompt that ends inside a character has U+FFFD in its place; when the first tokens complete the character,
    it is part of what they give.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._window = (
            _Window(tokenizer, prompt_ids, skip_special_tokens) if tokenizer.decoding.kind == "other" else None
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.decoding.strip and not any(self._bytes(id) for id in prompt_ids)
        self._decoder.decode(b"".join(self._bytes(id) for id in prompt_ids[-_TAIL:]))
        self._open = self._decoder.getstate()[0].decode("utf-8", "replace")
        """What the prompt's text has for its last character, which is incomplete; empty once something has come."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now and was not before `ids`."""
        if self._window is not None:
            return self._window.push(ids)
        return self._decode(b"".join(self._bytes(id) for id in ids), final=False)

    def finish(self) -> str:
        """What is left at the end: U+FFFD for bytes of a character that never became whole."""
        if self._window is not None:
            return self._window.finish()
        return self._decode(b"", final=True)

    def _bytes(self, id: int) -> bytes:
        return b"" if id in self._hidden else self._tokenizer.token_bytes(id)

    def _decode(self, data: bytes, final: bool) -> str:
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text = self._decoder.decode(data, final)
        if self._open and text:
            text = text.removeprefix(self._open)  # the prompt's text has it already
            self._open = ""
        return text


class _Window:
    """Incremental decoding where only whole sequences can be decoded: what a longer piece of the sequence's end adds
    to the text of a shorter one."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_ids[-_TAIL:])
        self._known = self._decode(self._ids)
        self._fresh = 0
        """Ids at the end whose text is not out yet."""

    def push(self, ids: Sequence[int]) -> str:
        self._ids += ids
        self._fresh += len(ids)
        text = self._decode(self._ids)
        if len(text) <= len(self._known) or text.endswith(_REPLACEMENT):
            return ""
        return self._advance(text)

    def finish(self) -> str:
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        added = text[len(self._known) :]
        self._ids = self._ids[-max(self._fresh, _TAIL) :]
        self._known = self._decode(self._ids)
        self._fresh = 0
        return added

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)


class StopStrings:
    """Looks for stop strings in text that comes in pieces.

    The match that is complete first ends the text; of several that are complete at the same character, the one that
    starts first. So the result does not depend on how the text was cut. Only text that may still turn out to be the
    beginning of a stop string is held back. (The matching is that of Knuth, Morris and Pratt 1977: a character costs
    the same whatever came before.)
    """

    def __init__(self, strings: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string stays in the text. ValueError for an empty string."""
        if not all(strings):
            raise ValueError("a stop string cannot be empty")
        self._strings = list(dict.fromkeys(strings))
        self._borders = [[0] for _ in self._strings]
        """Per string, for each prefix that was needed so far: the length of its longest proper prefix that is also its
        suffix."""
        self._matched = [0] * len(self._strings)
        """Per string how many of its characters the text now ends with."""
        self._include = include
        self._held = ""
        self._found = False

    def fresh(self) -> StopStrings:
        """The same for another text; what is known of the strings is shared."""
        other = copy.copy(self)
        other._matched = [0] * len(self._strings)
        other._held, other._found = "", False
        return other

    def push(self, text: str, match: bool = True) -> tuple[str, str | None]:
        """(text that is certain to be before any stop string, the stop string that was found).

        After a find everything else pushed is dropped. With `match` False a stop string completed by `text` is not
        taken for one; it may still begin there.
        """
        if self._found:
            return "", None
        if not self._strings:
            return text, None
        for at, character in enumerate(text):
            complete = self._step(character)
            if complete is not None and match:
                self._found = True
                whole = self._held + text[: at + 1]
                self._held = ""
                return (whole if self._include else whole[: len(whole) - len(complete)]), complete
        whole = self._held + text
        keep = max(self._matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def flush(self) -> str:
        """The text held back, when nothing more comes."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._strings)
        return held

    def _step(self, character: str) -> str | None:
        """Take one character; the longest stop string it completes."""
        complete: str | None = None
        for i, string in enumerate(self._strings):
            count = self._matched[i]
            while count and string[count] != character:
                count = self._border(i, count)
            if string[count] == character:
                count += 1
            if count == len(string):
                if complete is None or len(string) > len(complete):
                    complete = string
                count = self._border(i, count)
            self._matched[i] = count
        return complete

    def _border(self, i: int, count: int) -> int:
        """Of the first `count` characters of string i. Looked for when it is needed: so a string costs no more than the
        text that is compared with it, however long it is."""
        string, borders = self._strings[i], self._borders[i]
        while len(borders) < count:
            at, border = len(borders), borders[-1]
            while border and string[at] != string[border]:
                border = borders[border - 1]
            borders.append(border + (string[at] == string[border]))
        return borders[count - 1]
