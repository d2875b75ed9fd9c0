"""What the engines are asked: each workload is a function of its name and the round, so that all of them get the same.

Prompts are words that are one token each in most vocabularies; no tokenizer is asked, and the engines' own counts of
tokens go into the figures.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import NamedTuple

from octavo.bench.client import Ask
from octavo.bench.data import WORDS

CURVE = (1, 2, 4, 8, 16, 32, 64, 100)
"""Streams at a time of the curve."""
DECODE = (1, 8, 32)
"""Sequences of a batch, for an engine without a server."""
CONTEXT = 128
"""Tokens before those that a batch decodes."""
STEPS = 64
"""Tokens that a sequence of a batch decodes."""
BATCHES = (*(f"decode{rows}" for rows in DECODE), "prompt512")
"""Workloads of an engine without a server."""
GREEDY = {"temperature": 0, "ignore_eos": True}


class Load(NamedTuple):
    asks: list[Ask]
    concurrency: int


def load_of(name: str, number: int, short: bool) -> Load:
    """The requests of a workload in a round; with `short` few of them, to see whether all of it works."""
    rng = random.Random(f"{name}/{number}")
    kind, count = split(name)
    if short:
        count = min(count, 8) if kind in _MIXED or kind == "prefix" else count
    return _MAKERS[kind](rng, count, short)


def split(name: str) -> tuple[str, int]:
    """`closed16` as ("closed", 16); what comes after a minus is left out. Raises ValueError."""
    found = re.fullmatch(r"([a-z]+)(\d*)(-[a-z]+)?", name)
    if found is None or found[1] not in _MAKERS:
        raise ValueError(f"no workload is called {name!r}")
    return found[1], int(found[2] or 0)


def text(rng: random.Random, words: int) -> str:
    return "".join(rng.choices(WORDS, k=words)).strip()


def _mixed(rng: random.Random, prompt: int = 90, answer: int = 96) -> Ask:
    """Lengths of a prompt and an answer that are as given on average, many shorter and some much longer."""
    return Ask(text(rng, _spread(rng, prompt, 12, 400)), _spread(rng, answer, 16, 256), extra=GREEDY)


def _spread(rng: random.Random, mean: float, low: int, high: int) -> int:
    sigma = 0.6
    return max(low, min(high, int(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


def _burst(rng: random.Random, count: int, short: bool) -> Load:
    return Load([_mixed(rng) for _ in range(count)], count)


def _closed(rng: random.Random, count: int, short: bool) -> Load:
    """`count` at a time, each half as long as in a burst: when one is answered the next one comes."""
    asks = [_mixed(rng, 45, 64) for _ in range(count if short else max(4, 2 * count))]
    return Load(asks, count)


def _single(rng: random.Random, count: int, short: bool) -> Load:
    return Load([Ask(text(rng, 90), 16 if short else 128, extra=GREEDY) for _ in range(2 if short else 6)], 1)


def _prefill(rng: random.Random, count: int, short: bool) -> Load:
    return Load([Ask(text(rng, count), 1, extra=GREEDY) for _ in range(1 if short else 4)], 1)


def _prefix(rng: random.Random, count: int, short: bool) -> Load:
    """A long beginning that all have in common, 16 at a time."""
    head = text(rng, 1000)
    return Load([Ask(f"{head}. {text(rng, 24)}", 8 if short else 32, extra=GREEDY) for _ in range(count)], 16)


_MIXED = ("burst", "closed")
_MAKERS: dict[str, Callable[[random.Random, int, bool], Load]] = {
    "burst": _burst,
    "closed": _closed,
    "single": _single,
    "prefill": _prefill,
    "prefix": _prefix,
}
