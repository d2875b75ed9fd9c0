"""The catalogue of architectures, made from the variants: `python -m tests.models.catalogue` writes it."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

from octavo.catalogue import document
from octavo.checkpoint import open_checkpoint
from octavo.models.features import features
from octavo.models.registry import MODULES, find
from tests.models.test_gguf_architectures import CONVERTED
from tests.models.tiny import VARIANTS, make

ROOT = Path(__file__).parents[2]
PATH = ROOT / "octavo" / "models" / "catalogue.json"
PAGE = ROOT / "docs" / "models.md"

INTRODUCTION = """# Models

The architectures that Octavo serves, as `config.json` names them; `octavo models` prints this list for the version that
is installed, `octavo models experts` those with a word in it.

<!-- run -->
```bash
octavo models SmolLM3
```

Each is tested against transformers in float32: logits within 2e-4, or 3e-5 of the largest, on random weights, greedy
tokens equal, the same bits
in every batch and however a prompt is cut; the same weights as a GGUF file where llama.cpp converts the architecture. A
checkpoint with a tensor missing, left over or of another shape does not load, and neither does a config that asks for
something that is not built: the error names the key. Weights may be stored in any format that
[Octavo reads](quantized.md). A new architecture takes a file of some 30 lines: [the recipe](recipes/architecture.md).

| Architecture | | Made of | Tested as |
|---|---|---|---|
"""


def about(name: str) -> str:
    """The first sentence of the module's docstring."""
    text = importlib.import_module(f"octavo.models.{MODULES[name]}").__doc__ or ""
    return " ".join(text.split("\n\n")[0].split())


def collect(folder: Path) -> dict[str, Any]:
    found: dict[str, set[str]] = {}
    gguf: set[str] = set()
    for variant in VARIANTS:
        path, _ = make(variant, folder)
        with open_checkpoint(path) as checkpoint:
            architecture = find(checkpoint.config)
            model = architecture.make(architecture.config(checkpoint.config), 512)
        found.setdefault(architecture.name, set()).update(features(model))
        if variant in CONVERTED:
            gguf.add(architecture.name)
    return {
        name: {
            "about": about(name),
            "features": sorted(words),
            "formats": ["safetensors", "GGUF"] if name in gguf else ["safetensors"],
        }
        for name, words in found.items()
    }


def page(found: dict[str, Any]) -> str:
    """docs/models.md."""
    rows = [
        f"| `{name}` | {e['about']} | {', '.join(e['features'])} | {', '.join(e['formats'])} |"
        for name, e in sorted(found.items())
    ]
    return INTRODUCTION + "\n".join(rows) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = collect(Path(scratch))
    PATH.write_text(document(made))
    PAGE.write_text(page(made))
