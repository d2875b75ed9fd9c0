"""The prompts of a benchmark: made of random words, or read from files."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from octavo.bench.client import Ask
from octavo.bench.options import BenchError, DataOptions
from octavo.bench.tokens import Count

WORDS = tuple(f" {word}" for word in Path(__file__).with_name("words.txt").read_text().split())
"""Words that are one token each in most vocabularies, with the space before them."""
T = TypeVar("T")
_TRIES = 16
"""Texts to try before one of another length is taken."""


def asks_of(options: DataOptions, count: Count) -> list[Ask]:
    """The requests that `options` describe: the same ones for the same options and tokenizer.

    Raises:
        BenchError: a file cannot be read or does not hold what it should.
    """
    rng = random.Random(f"{options.dataset_name}/{options.seed}")
    return _MAKERS[options.dataset_name](options, count, rng)


@dataclass
class Writer:
    """Makes random texts of exact numbers of tokens."""

    rng: random.Random
    count: Count
    _overhead: int = field(default=0, init=False)
    """Tokens beside those of the words, as the last text without a head had them."""

    def text(self, length: int, head: str = "", head_length: int = 0) -> Ask:
        """`head` (of `head_length` tokens) and random words, together of `length` tokens; with a tokenizer that cannot
        make that length, of nearly as many. Returned as an `Ask` of no answer."""
        words = self._words(max(length - head_length - (0 if head else self._overhead), 1))
        best: tuple[int, str, int] | None = None
        each = 1.0  # tokens of a word
        for _ in range(_TRIES):
            text = head + "".join(words)
            found = self.count(text)
            if best is None or abs(found - length) < best[0]:
                best = abs(found - length), text, found
            if found == length:
                self._overhead = found - head_length - len(words) if not head else self._overhead
                break
            each = max((found - head_length) / len(words), 1.0) if words else each
            if found > length:
                del words[-max(1, round((found - length) / each)) :]
            elif length - found >= each:
                words += self._words(int((length - found) / each))
            else:
                return self._filled(text, found, length)
        assert best is not None
        return Ask(best[1], 0, best[2])

    def _words(self, count: int) -> list[str]:
        return self.rng.choices(WORDS, k=count)

    def _filled(self, text: str, found: int, length: int) -> Ask:
        """`text` and a few tokens more, of which no word is that short."""
        best = Ask(text, 0, found)
        for piece in (" a", "a", "."):
            longer = text + piece * (length - found)
            if (now := self.count(longer)) == length:
                return Ask(longer, 0, now)
        return best


def _random(options: DataOptions, count: Count, rng: random.Random) -> list[Ask]:
    writer = Writer(rng, count)
    head = _head(writer, options)
    return [_drawn(writer, options, head) for _ in range(options.num_prompts)]


def _head(writer: Writer, options: DataOptions) -> Ask:
    """What all prompts begin with."""
    return writer.text(options.random_prefix_len) if options.random_prefix_len else Ask("", 0)


def _drawn(writer: Writer, options: DataOptions, head: Ask) -> Ask:
    """A random prompt and the length of its answer."""
    length = _length(writer.rng, options.random_input_len, options.random_range_ratio)
    prompt = writer.text(head.prompt_tokens + length, str(head.prompt), head.prompt_tokens)
    return replace(prompt, max_tokens=_length(writer.rng, options.random_output_len, options.random_range_ratio))


def _length(rng: random.Random, length: int, ratio: float) -> int:
    return max(1, rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))


def _burst(options: DataOptions, count: Count, rng: random.Random) -> list[Ask]:
    writer = Writer(rng, count)
    one = _drawn(writer, replace(options, random_range_ratio=0.0), _head(writer, options))
    return [replace(one) for _ in range(options.num_prompts)]


def _prefix_repetition(options: DataOptions, count: Count, rng: random.Random) -> list[Ask]:
    writer = Writer(rng, count)
    heads = [writer.text(options.prefix_repetition_prefix_len) for _ in range(options.prefix_repetition_num_prefixes)]
    asks = []
    for index in range(options.num_prompts):
        head = heads[index % len(heads)]
        length = head.prompt_tokens + options.prefix_repetition_suffix_len
        prompt = writer.text(length, str(head.prompt), head.prompt_tokens)
        asks.append(replace(prompt, max_tokens=options.prefix_repetition_output_len))
    rng.shuffle(asks)
    return asks


def _multi_turn(options: DataOptions, count: Count, rng: random.Random) -> list[Ask]:
    """Conversations in turn: all of the first one, then all of the second one."""
    said = _sharegpt_turns(options, rng) if options.dataset_path else _random_turns(options, count, rng)
    asks: list[Ask] = []
    for turns in said:
        for index, turn in enumerate(turns[: options.num_prompts - len(asks)]):
            asks.append(replace(turn, after=len(asks) - 1 if index else None))
        if len(asks) == options.num_prompts:
            break
    if not asks:
        raise BenchError(f"{options.dataset_path}: nobody asks anything in it.")
    return asks


def _random_turns(options: DataOptions, count: Count, rng: random.Random) -> Iterator[list[Ask]]:
    writer = Writer(rng, count)
    head = _head(writer, options)
    while True:
        rest = [_drawn(writer, options, Ask("", 0)) for _ in range(options.multi_turn_num_turns - 1)]
        yield [_drawn(writer, options, head), *rest]


def _sharegpt_turns(options: DataOptions, rng: random.Random) -> Iterator[list[Ask]]:
    length = options.sharegpt_output_len or options.random_output_len
    asked = [
        [Ask(text, length) for who, text in conversation if who in ("human", "user")]
        for conversation in _sharegpt_file(options)
    ]
    several = [turns[: options.multi_turn_num_turns] for turns in _ordered(asked, options, rng) if turns]
    return iter(several) if options.no_oversample else itertools.cycle(several)


def _sharegpt(options: DataOptions, count: Count, rng: random.Random) -> list[Ask]:
    """First messages and the lengths of their answers; very short and very long ones are left out, as in vLLM."""

    def usable() -> Iterator[Ask]:
        for conversation in _ordered(_sharegpt_file(options), options, rng):
            if len(conversation) >= 2:
                asked, answered = conversation[0][1], conversation[1][1]
                prompt_tokens, tokens = count(asked), options.sharegpt_output_len or count(answered)
                if 4 <= prompt_tokens <= 1024 and tokens >= 4 and prompt_tokens + tokens <= 2048:
                    yield Ask(asked, tokens, prompt_tokens)

    return _taken(usable(), options)


def _sharegpt_file(options: DataOptions) -> list[list[tuple[str, str]]]:
    """Conversations as (who, text)."""
    path = options.dataset_path
    try:
        rows = json.loads(_read(path))
        return [[(turn["from"], turn["value"]) for turn in row["conversations"]] for row in rows]
    except (ValueError, KeyError, TypeError):
        raise BenchError(
            f'{path} must be a JSON list of {{"conversations": [{{"from": "human", "value": TEXT}}, ...]}}.'
        ) from None


def _custom(options: DataOptions, count: Count, rng: random.Random) -> list[Ask]:
    lines = [
        _custom_line(line, f"{options.dataset_path}, line {number}", options.custom_output_len)
        for number, line in enumerate(_read(options.dataset_path).splitlines(), 1)
        if line.strip()
    ]
    return _taken(_ordered(lines, options, rng), options)


def _custom_line(line: str, place: str, length: int) -> Ask:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{place} is not JSON: {error}.") from None
    prompt: Any = row.get("prompt", row.get("messages")) if isinstance(row, dict) else None
    if not prompt or not isinstance(prompt, str | list):
        raise BenchError(f"{place} must be an object with a prompt or messages.")
    tokens = row.get("output_tokens", length)
    if not isinstance(tokens, int) or tokens < 1:
        raise BenchError(f"{place}: output_tokens must be a whole number of at least 1, got {tokens!r}.")
    return Ask(prompt, tokens)


def _ordered(rows: Sequence[T], options: DataOptions, rng: random.Random) -> list[T]:
    """The rows in a random order, unless told otherwise."""
    order = list(rows)
    if not options.disable_shuffle:
        rng.shuffle(order)
    return order


def _taken(asks: Iterable[Ask], options: DataOptions) -> list[Ask]:
    """As many as are wanted, again and again the same ones unless told otherwise. Raises BenchError for none."""
    found = list(itertools.islice(asks, options.num_prompts))
    if not found:
        raise BenchError(f"{options.dataset_path} holds no prompt that can be used.")
    return found if options.no_oversample else list(itertools.islice(itertools.cycle(found), options.num_prompts))


def _read(path: str | None) -> str:
    try:
        return Path(str(path)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read {path}: {error}.") from None


_MAKERS = {
    "random": _random,
    "burst": _burst,
    "prefix_repetition": _prefix_repetition,
    "multi-turn": _multi_turn,
    "sharegpt": _sharegpt,
    "custom": _custom,
}
