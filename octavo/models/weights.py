"""Strict streaming load: every tensor of the model is filled once, every tensor of the checkpoint used or listed, or a
bias of zeros.

All names and shapes are checked before the first byte is read; then leaf after leaf is packed by the device (of a
mixture expert after expert), so peak memory is the packed model plus one leaf.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from octavo.layers.linear import Embedding, Leaf, Linear, Need, Positions, Value
from octavo.layers.moe import Experts
from octavo.layers.views import Transposed, take_columns, take_rows
from octavo.models.decoder import Decoder
from octavo.models.names import Names, Source, expand
from octavo.ops.contract import F32, Device, Stored
from octavo.parallel.rank import Cut

Keep = Callable[[str, Callable[[], Stored]], Stored]
"""Called as keep(name, make): a matrix as it was kept, or as `make` makes it."""


class LoadError(ValueError):
    """The checkpoint and the architecture do not fit together; the message lists what is wrong."""


EXACT = frozenset({"lm_head", "router", "shared_gate"})
"""Last words of the paths of products that are never quantized while they are loaded: they choose, and are small."""


SHOWN = 8
"""Problems that an error lists; only for these are similar names looked for, which takes long."""


class Checkpoint(Protocol):
    """What the loader needs of a checkpoint (`octavo.checkpoint`)."""

    style: str

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def in_groups(self, name: str) -> bool: ...
    def as_linear(self, name: str) -> bool: ...
    def stored(self, name: str, index: int | None = None) -> Stored: ...
    def vector(self, name: str, index: int | None = None) -> F32: ...


def load(
    model: Decoder,
    checkpoint: Checkpoint,
    names: Names,
    device: Device,
    ignore: tuple[str, ...] = (),
    on_progress: Callable[[int, int], Any] | None = None,
    quantize: Callable[[Stored], Stored] | None = None,
    quantize_tables: Callable[[Stored], Stored] | None = None,
    keep: Keep | None = None,
) -> None:
    """Fill `model` from `checkpoint`.

    `ignore`: glob patterns of checkpoint tensors that may stay unused. `on_progress(done, total)` is called after each
    leaf. `quantize` is applied to every whole matrix that is multiplied with (of linear layers and experts, but not of
    EXACT and not of embeddings), before a rank takes its part, so that every split has the same values;
    `quantize_tables` to the tables of embeddings and the head. `keep(name, make)` stands between the loader and every
    whole matrix, under a name that no other matrix of the model has.

    Raises LoadError before anything is packed when a tensor is missing, left over or of the wrong shape.
    """
    plan, problems = fit(model, checkpoint, names, ignore)
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        shown = "; ".join(problems[:SHOWN]) + more
        raise LoadError(f"the checkpoint does not fit its architecture: {shown}")
    leaves = dict(model.leaves())
    for done, (path, leaf) in enumerate(leaves.items()):
        rounds = quantize if may_round(path, leaf) else quantize_tables if is_table(path, leaf) else None
        values = ((found.need, _read(path, found, checkpoint, rounds, keep)) for found in plan[path])
        leaf.fill(device, values, checkpoint.style)
        if on_progress:
            on_progress(done + 1, len(leaves))


def quantizable(model: Decoder) -> tuple[int, int]:
    """Elements of the matrices that `load` gives to `quantize`, and to `quantize_tables`."""
    chosen: list[Callable[[str, Leaf], bool]] = [may_round, is_table]
    leaves = [[leaf for path, leaf in model.leaves() if of(path, leaf)] for of in chosen]
    products, tables = (sum(math.prod(n.whole) for leaf in ls for n in leaf.needs() if n.matrix) for ls in leaves)
    return products, tables


def fit(
    model: Decoder, checkpoint: Checkpoint, names: Names, ignore: tuple[str, ...] = ()
) -> tuple[dict[str, list[Found]], list[str]]:
    """Which tensors fill each leaf, by its path, and a sentence for each thing that is wrong: tensors that are missing,
    left over or of the wrong shape. Reads nothing but names and shapes. Raises LoadError for a name table with gaps."""
    sources = _Sources(names, model, checkpoint)
    plan = {path: list(_find(path, leaf, sources)) for path, leaf in model.leaves()}
    allowed = list(ignore)
    if model.lm_head is None:  # a tied model may store its table twice
        allowed += [f"{source.name}.weight" for source in sources["lm_head"]]
    found = [one for row in plan.values() for one in row]
    return plan, _problems(found, checkpoint, allowed, model.config.experts)


class Found(NamedTuple):
    """A need, the full name of the tensor that fills it, and how it lies there."""

    need: Need
    name: str
    source: Source
    rows: tuple[Cut, ...] = ()
    """Of a tensor that holds several parts, what a rank keeps of each, where it does not keep all."""


class _Sources:
    """The rows of a name table by path, in the checkpoint's style."""

    def __init__(self, names: Names, model: Decoder, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.have = checkpoint.names()
        self._by_path: dict[str, list[Source]] = defaultdict(list)
        for source in expand(names, model.config.layers, model.config.experts):
            if source.view is not None and checkpoint.style == "gguf" and not source.view.in_gguf:
                source = source._replace(view=None)
            self._by_path[source.path].append(source)

    def __getitem__(self, path: str) -> list[Source]:
        return self._by_path.get(path, [])

    def find(self, path: str, need: Need) -> Found | None:
        """The first source of a need whose tensor exists; else the first of all; None where the table has none."""
        path = f"{path}.{need.part}" if need.part else path
        found = [Found(need, s.name, s) for s in self[path + need.ending]] if need.ending else []
        found += [Found(need, s.name + need.ending, s) for s in self[path]]
        best = next((f for f in found if f.name in self.have), found[0] if found else None)
        if best is not None and need.matrix and best.name in self.have and self.checkpoint.as_linear(best.name):
            view = best.source.view
            return best._replace(source=best.source._replace(view=view.rows)) if isinstance(view, Transposed) else best
        return best


def _find(path: str, leaf: Leaf, sources: _Sources) -> Iterator[Found]:
    """The tensors of a leaf, in the order of its needs; parts that the checkpoint keeps in one tensor are one need."""
    for (prefix, _), group in groupby(leaf.needs(), lambda need: (need.part.rpartition(".")[0], need.ending)):
        needs = list(group)
        found = [sources.find(path, need) for need in needs]
        stackable = len(needs) > 1 and all(need.shape for need in needs)
        if stackable and not all(f is not None and f.name in sources.have for f in found):
            whole = sources.find(path, _stack(needs, prefix))
            if whole is not None and (whole.name in sources.have or _first(whole, found, sources.have)):
                found, needs = [whole._replace(rows=_kept(needs))], [whole.need]
        for need, one in zip(needs, found, strict=True):
            if one is None:
                raise LoadError(f"the architecture's name table has no row for {path}.{need.part}{need.ending}")
            if one.name in sources.have or not need.optional:
                yield one


def _first(whole: Found, parts: list[Found | None], have: set[str]) -> bool:
    """Whether a tensor of all parts, which is not there, is what is missing: not they."""
    there = [part for part in parts if part is not None and part.name in have]
    rows = [part.source.row for part in parts if part is not None]
    return len(rows) < len(parts) or not there and whole.source.row < min(rows)


def _stack(needs: list[Need], prefix: str) -> Need:
    """One need for parts that lie one after another, none of their rows cut."""
    first = needs[0]
    rows = sum(need.whole[0] for need in needs)
    return first._replace(part=prefix, shape=(rows, *first.shape[1:]), cuts=(None, first.cuts[1]))


def _kept(needs: list[Need]) -> tuple[Cut, ...]:
    """The rows of the parts in their stack, where a rank keeps only some."""
    if all(need.cuts[0] is None for need in needs):
        return ()
    kept, at = [], 0
    for need in needs:
        cut = need.cuts[0] or Cut(0, need.shape[0], need.shape[0])
        kept.append(cut._replace(start=at + cut.start))
        at += cut.whole
    return tuple(kept)


def _problems(plan: list[Found], checkpoint: Checkpoint, allowed: list[str], experts: int) -> list[str]:
    have = checkpoint.names()
    wanted = dict.fromkeys((found.name, _shape(found, experts)) for found in plan)
    used = {name for name, _ in wanted}
    left = sorted(n for n in have - used if not any(fnmatch.fnmatch(n, p) for p in allowed))
    unused = [name for name in left if not _adds_nothing(name, checkpoint)]
    problems: list[str] = []
    for name in dict.fromkeys(found.name for found in plan):
        if name not in have:
            near = difflib.get_close_matches(name, unused, 1, 0.8) if len(problems) < SHOWN else []
            problems.append(f"{name} is missing" + (f" (the checkpoint has {near[0]})" if near else ""))
    for name, shape in wanted:
        if name in have and _lies(checkpoint, name, shape) != shape:
            problems.append(f"{name} has shape {list(checkpoint.shape(name))}, {list(shape)} is needed")
    return problems + [f"{name} is in the checkpoint, but this architecture does not use it" for name in unused]


def _adds_nothing(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor is a bias of zeros: AutoGPTQ writes one for every module that it has quantized."""
    return name.endswith(".bias") and not checkpoint.vector(name).any()


def _shape(found: Found, experts: int) -> tuple[int, ...]:
    """That the tensor must have in the checkpoint."""
    view = found.source.view
    shape = found.need.whole if view is None else view.shape(found.need.whole)
    return shape if found.source.expert is None else (experts, *shape)


def _lies(checkpoint: Checkpoint, name: str, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of a tensor; `wanted` where it says only its groups and these make whole rows of that."""
    shape = tuple(checkpoint.shape(name))
    fits = math.prod(shape) == math.prod(wanted) and len(shape) == len(wanted) == 2 and wanted[1] % shape[1] == 0
    return wanted if fits and checkpoint.in_groups(name) else shape


def may_round(path: str, leaf: Leaf) -> bool:
    """Whether the matrices of a leaf are those that `load` quantizes."""
    return isinstance(leaf, Linear | Experts) and path.rpartition(".")[2] not in EXACT


def is_table(path: str, leaf: Leaf) -> bool:
    """Whether the matrix of a leaf is one that `load` gives to `quantize_tables`."""
    return path == "lm_head" or isinstance(leaf, Embedding) and not isinstance(leaf, Positions)


def _read(
    path: str,
    found: Found,
    checkpoint: Checkpoint,
    quantize: Callable[[Stored], Stored] | None,
    keep: Keep | None,
) -> Value:
    need, name, (_, _, view, expert, _), _ = found
    if need.matrix:
        make = partial(_matrix, found, checkpoint, quantize)
        stored = make() if keep is None else keep(f"{path}:{need.part}", make)
        for order in _rows(found):
            stored = take_rows(stored, order)
        columns = need.cuts[1]
        return stored if columns is None else take_columns(stored, columns.start, columns.size)
    values = checkpoint.vector(name, expert)
    if view is not None:
        values = view.vector(values)
    for order in _rows(found):
        values = values.reshape(need.whole)[order].reshape(-1)
    return values


def _matrix(found: Found, checkpoint: Checkpoint, quantize: Callable[[Stored], Stored] | None) -> Stored:
    """The whole matrix, as every rank takes its part of it."""
    _, name, (_, _, view, expert, _), _ = found
    stored = checkpoint.stored(name, expert)
    if checkpoint.in_groups(name):
        n_out, n_in = _shape(found, 1)[-2:]
        stored = stored._replace(n_out=n_out, n_in=n_in, data=stored.data.reshape(n_out, -1))
    if view is not None:
        stored = view.matrix(stored)
    if quantize is None:
        return stored
    try:
        return quantize(stored)
    except ValueError as error:  # it does not know which one it was
        raise LoadError(f"{name}: {error}") from None


def _rows(found: Found) -> list[Any]:
    """What a rank keeps of the first dimension, as at most one index."""
    cut = found.need.cuts[0]
    if found.rows:
        return [np.concatenate([np.arange(c.start, c.start + c.size) for c in found.rows])]
    return [] if cut is None else [slice(cut.start, cut.start + cut.size)]
