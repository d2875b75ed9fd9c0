"""What a format loses on a fixed text, and the memory of its weights: `apart` runs this module."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.formats.apart import Figures, answer
from octavo.checkpoint import open_checkpoint
from octavo.config import EngineConfig
from octavo.devices.cpu.device import CpuDevice
from octavo.quant.onload import RULES, quantize
from octavo.resolve import activations
from octavo.text.tokenizer import Tokenizer
from tests import realmodels
from tests.models.tiny import Loaded

TEXT = Path(__file__).with_name("text.txt")


def of_kinds(path: str, rule: str | None) -> str:
    """The activations that Octavo takes for the weights by default."""
    with open_checkpoint(Path(path)) as checkpoint:
        kinds = frozenset(checkpoint.kind(n) for n in checkpoint.names() if len(checkpoint.shape(n)) >= 2)
    more = {RULES[rule].kind} if rule else set()
    return activations(EngineConfig(model=path), kinds | more)[0]


def logits(path: str, rule: str | None, count: int, chosen: str, kv_dtype: str) -> tuple[Any, float]:
    """float32 [count, vocabulary] of the text, and the bytes of the weights in memory."""
    tokens = Tokenizer.from_folder(realmodels.smollm2_hf()).encode(TEXT.read_text())[:count]
    if len(tokens) < count:
        raise ValueError(f"the text has {len(tokens)} tokens: {count} is too many")
    device = CpuDevice(None, chosen)
    how = RULES[rule] if rule else None
    loaded = Loaded(
        Path(path),
        device,
        max_model_len=count,
        blocks=-(-count // 16),
        tokens=count,
        kv_dtype=kv_dtype,
        quantize=partial(quantize, how) if how else None,
        quantize_tables=partial(quantize, how.tables) if how and how.tables else None,
    )
    return loaded.logits(tokens), device.weight_bytes


def losses(path: str, rule: str | None, reference: str, count: int) -> Figures:
    """KL divergence and top-1 agreement with the logits in the file `reference`, which is written where it is not
    there: with activations and KV cache in float32, and as by default. `rule` is what quantizes the matrices while they
    are loaded."""
    chosen = of_kinds(path, rule)
    got, size = logits(path, rule, count, "float32", "float32")
    if not Path(reference).exists():
        np.save(reference, got)
    want = np.load(reference)
    kl, top1 = distance(got, want)
    default = distance(logits(path, rule, count, chosen, "float16")[0], want)
    return {
        "activations": chosen,
        "memory_mib": size / 2**20,
        "kl": kl,
        "top1": top1,
        "default_kl": default[0],
        "default_top1": default[1],
    }


def distance(got: Any, want: Any) -> tuple[float, float]:
    """Mean KL divergence of `got` from `want`, logits [n, vocabulary], and the share of rows with the same greatest."""
    total = 0.0
    for pair in zip(want, got, strict=True):
        p, q = (row.astype(np.float64) - row.max() for row in pair)
        p, q = (row - np.log(np.exp(row).sum()) for row in (p, q))
        total += float(np.exp(p) @ (p - q))
    return total / len(want), float((got.argmax(1) == want.argmax(1)).mean())


if __name__ == "__main__":
    answer(losses)
