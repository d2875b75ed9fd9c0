"""Strict streaming load: every tensor of the model is filled once, every tensor of the checkpoint used or listed.

All names and shapes are checked before the first byte is read; then leaf after leaf is packed by the device, so peak
memory is the packed model plus one leaf.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from octavo.layers.linear import Embedding, Leaf, Linear, RMSNorm
from octavo.models.decoder import Decoder
from octavo.models.names import Names, expand
from octavo.ops.contract import F32, Device, Stored


class LoadError(ValueError):
    """The checkpoint and the architecture do not fit together; the message lists what is wrong."""


class Checkpoint(Protocol):
    """What the loader needs of a checkpoint (`octavo.checkpoint`)."""

    style: str

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def stored(self, name: str) -> Stored: ...
    def vector(self, name: str) -> F32: ...


def load(
    model: Decoder,
    checkpoint: Checkpoint,
    names: Names,
    device: Device,
    ignore: tuple[str, ...] = (),
    on_progress: Callable[[int, int], Any] | None = None,
) -> None:
    """Fill `model` from `checkpoint`.

    `ignore`: glob patterns of checkpoint tensors that may stay unused. `on_progress(done, total)` is called after each
    leaf. Raises LoadError before anything is packed when a tensor is missing, left over or of the wrong shape.
    """
    sources: dict[str, str] = {ours: theirs for theirs, ours in expand(names, model.config.layers)}
    leaves = dict(model.leaves())
    plan = _plan(leaves, sources, checkpoint)
    allowed = list(ignore)
    if model.lm_head is None:
        allowed.append(sources["lm_head"] + ".weight")  # a tied model may store its table twice
    _check(plan, checkpoint, allowed)
    for done, (path, leaf) in enumerate(leaves.items()):
        _fill(leaf, plan[path], checkpoint, device)
        if on_progress:
            on_progress(done + 1, len(leaves))


Plan = list[tuple[str, tuple[int, ...]]]
"""Tensors of one leaf as (checkpoint name, expected shape): its parts' weights in order, then their biases."""


def _plan(leaves: dict[str, Leaf], sources: dict[str, str], checkpoint: Checkpoint) -> dict[str, Plan]:
    have = checkpoint.names()
    plan: dict[str, Plan] = {}
    for path, leaf in leaves.items():
        if isinstance(leaf, Linear):
            bases = [(sources[f"{path}.{part}" if part else path], n) for part, n in leaf.parts.items()]
            rows: Plan = [(f"{base}.weight", (n, leaf.n_in)) for base, n in bases]
            biased = leaf.biased
            if biased is None:
                biased = any(f"{base}.bias" in have for base, _ in bases)
            if biased:
                rows += [(f"{base}.bias", (n,)) for base, n in bases]
        elif isinstance(leaf, Embedding):
            rows = [(f"{sources[path]}.weight", (leaf.vocab, leaf.width))]
        elif isinstance(leaf, RMSNorm):
            rows = [(f"{sources[path]}.weight", (leaf.width,))]
        else:
            raise TypeError(f"the loader knows no leaf of kind {type(leaf).__name__} (at {path})")
        plan[path] = rows
    return plan


def _check(plan: dict[str, Plan], checkpoint: Checkpoint, allowed: list[str]) -> None:
    have = checkpoint.names()
    wanted = {name: shape for rows in plan.values() for name, shape in rows}
    unused = sorted(n for n in have - wanted.keys() if not any(fnmatch.fnmatch(n, p) for p in allowed))
    missing = [n for n in wanted if n not in have]
    wrong = [
        f"{name} has shape {list(checkpoint.shape(name))}, {list(shape)} is needed"
        for name, shape in wanted.items()
        if name in have and tuple(checkpoint.shape(name)) != shape
    ]
    problems: list[str] = []
    for name in missing:
        near = difflib.get_close_matches(name, unused, 1, 0.8)
        problems.append(f"{name} is missing" + (f" (the checkpoint has {near[0]})" if near else ""))
    problems += wrong
    problems += [f"{name} is in the checkpoint, but this architecture does not use it" for name in unused]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise LoadError(f"the checkpoint does not fit its architecture: {shown}")


def _fill(leaf: Leaf, rows: Plan, checkpoint: Checkpoint, device: Device) -> None:
    matrices = [name for name, shape in rows if len(shape) == 2]
    vectors = [checkpoint.vector(name) for name, shape in rows if len(shape) == 1]
    if isinstance(leaf, RMSNorm):
        values = vectors[0]
        if leaf.plus_one and checkpoint.style == "hf":
            values = values + np.float32(1)
        leaf.weight = device.vector(values)
    elif isinstance(leaf, Linear | Embedding):
        leaf.weight = device.weight([checkpoint.stored(name) for name in matrices])
        if vectors and isinstance(leaf, Linear):
            leaf.bias = device.vector(np.concatenate(vectors))
