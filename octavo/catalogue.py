"""The architectures and what is tested of each: the data behind `octavo models`.

models/catalogue.json is made from the models of the tests (`python -m tests.models.catalogue`), and a test compares
the two.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, NamedTuple

from octavo.checkpoint.quantized import METHODS
from octavo.quant import GGUF_QUANTIZED, KINDS


class Entry(NamedTuple):
    """An architecture."""

    name: str
    """As config.json gives it."""
    about: str
    features: list[str]
    formats: list[str]
    """Kinds of checkpoint whose logits are tested against the reference."""


def entries(word: str = "") -> list[Entry]:
    """The architectures whose name, description or features hold `word` (in any case), sorted by name."""
    text = resources.files("octavo.models").joinpath("catalogue.json").read_text()
    found = [Entry(name, **entry) for name, entry in json.loads(text).items()]
    return [e for e in found if word.lower() in " ".join([e.name, e.about, *e.features]).lower()]


def as_json(found: list[Entry]) -> str:
    return json.dumps([entry._asdict() for entry in found], indent=2)


def as_text(found: list[Entry]) -> str:
    """A block per architecture, then the formats that weights of any of them may have."""
    if not found:
        return "No architecture fits. `octavo models` without a word lists all."
    blocks = [f"{e.name}\n  {e.about}\n  {', '.join(e.features)}\n  tested: {', '.join(e.formats)}" for e in found]
    count = f"{len(found)} architecture{'s' * (len(found) != 1)}"
    plain = " ".join(kind for kind, (block, _) in KINDS.items() if block == 1)
    return "\n".join(
        [
            *blocks,
            "",
            f"{count}. Weights: {plain}; in GGUF files {' '.join(sorted(GGUF_QUANTIZED))}; in folders quantized with "
            f"{' '.join(sorted(METHODS))}.",
        ]
    )


def document(found: dict[str, Any]) -> str:
    """The content of catalogue.json."""
    return json.dumps(dict(sorted(found.items())), indent=1, ensure_ascii=False) + "\n"
