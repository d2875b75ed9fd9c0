"""What transformers computes in float32 for a fixed text: `apart` runs this module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.formats.apart import Figures, answer, apart
from benchmarks.formats.losses import TEXT
from benchmarks.peers.engines import home
from benchmarks.peers.models import made
from octavo.text.tokenizer import Tokenizer

POSITIONS = 48
"""Places of the text at which engines are asked what comes next."""
FIRST, LAST = 16, 320
"""Tokens before the first and the last of them."""


def places(length: int) -> list[int]:
    """Numbers of tokens before each position."""
    return [int(place) for place in np.linspace(FIRST, min(LAST, length), POSITIONS)]


def reference(folder: Path) -> tuple[list[int], Any]:
    """The text's tokens, and logits [positions, vocabulary] at `places`; computed once for a model in float32."""
    ids = Tokenizer.from_folder(folder).encode(TEXT.read_text())[:LAST]

    def write(target: Path) -> None:
        apart("benchmarks.peers.reference", folder=str(folder), ids=ids, file=str(target))

    return ids, np.load(made(home() / f"reference-{folder.name}.npy", write))


def save(folder: str, ids: list[int], file: str) -> Figures:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    np.save(file, logits[[place - 1 for place in places(len(ids))]].numpy())
    return {}


if __name__ == "__main__":
    answer(save)
