"""What every device asks of the arrays of a step before it computes: one wrong index would read another's memory.

All checks are vectorised; they run each step, and cost less than 0.1 ms for a few hundred rows. Each raises
`ValueError` that names the array and what is wrong with it.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from octavo.ops.contract import (
    I32,
    KV_LARGEST_SCALE,
    KV_LEAST_SCALE,
    KV_TYPES,
    BatchArrays,
    BatchLimits,
    KVSpec,
    Router,
    Sampling,
    Scoring,
    Stored,
)

Values = npt.NDArray[Any]


_INT32, _UINT64, _FLOAT32 = np.dtype(np.int32), np.dtype(np.uint64), np.dtype(np.float32)
# Not the methods of arrays, which are a detour through Python: dozens of these run in each step.
_least, _most = np.minimum.reduce, np.maximum.reduce
_TINY = float(np.finfo(np.float32).tiny)
_HUGE = float(np.finfo(np.float32).max)


def check_batch(batch: BatchArrays, limits: BatchLimits, spec: KVSpec, vocab: int) -> None:
    """`batch` is a step that a model with `vocab` embedding rows, `spec` as KV cache and `limits` as sizes can run.

    The block ids that the step writes to are checked here. Those that it only reads depend on a layer's window; a
    device checks them where it reads.
    """
    tokens, sequences = batch.tokens.size, batch.slots.size
    for name in ("tokens", "positions", "starts", "slots", "rows"):
        _vector(name, getattr(batch, name), _INT32)
    _length("positions", batch.positions, tokens)
    _length("starts", batch.starts, sequences + 1)
    _at_most("tokens", tokens, limits.tokens)
    _at_most("slots", sequences, limits.sequences)
    _at_most("rows", batch.rows.size, limits.rows)
    check_ids("tokens", batch.tokens, vocab)
    check_ids("positions", batch.positions, limits.max_model_len)
    check_ids("slots", batch.slots, limits.sequences)
    check_ids("rows", batch.rows, tokens)
    if batch.rows.size > 1 and (batch.rows[1:] < batch.rows[:-1]).any():
        raise ValueError("rows: must be in ascending order")
    lengths = _lengths("starts", batch.starts, tokens)
    if sequences and _least(lengths) < 1:
        raise ValueError("starts: every sequence of a step must own at least one token")
    slots = batch.slots.astype(np.intp)
    taken = np.zeros(limits.sequences, np.bool_)
    taken.put(slots, True)
    if np.count_nonzero(taken) < sequences:
        raise ValueError("slots: two sequences of a step share a slot")
    _consecutive(batch)
    _written_blocks(batch, lengths, spec)


def check_sampling(sampling: Sampling, rows: int, vocab: int) -> None:
    """`sampling` holds parameters in range for `rows` rows over `vocab` ids."""
    for name in ("top_k", "choice", "position", "target", "logprobs"):
        _length(name, _vector(name, getattr(sampling, name), _INT32), rows)
    for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
        _length(name, _vector(name, getattr(sampling, name), _FLOAT32), rows)
    _length("seed", _vector("seed", sampling.seed, _UINT64), rows)
    for name in ("seen", "bias", "allow", "report"):
        values = getattr(sampling, f"{name}_ids")
        if name == "report" and not sampling.report_ptr.size and not values.size:
            continue
        pointers = _vector(f"{name}_ptr", getattr(sampling, f"{name}_ptr"), _INT32)
        _length(f"{name}_ptr", pointers, rows + 1)
        if _least(_lengths(f"{name}_ptr", pointers, values.size), initial=0) < 0:
            raise ValueError(f"{name}_ptr: must not decrease")
        check_ids(f"{name}_ids", _vector(f"{name}_ids", values, _INT32), vocab)
    _length("seen_counts", _vector("seen_counts", sampling.seen_counts, _INT32), sampling.seen_ids.size)
    _length("bias_values", _vector("bias_values", sampling.bias_values, _FLOAT32), sampling.bias_ids.size)
    if not rows:
        return
    _within("temperature", sampling.temperature, 0, _HUGE)
    _within("top_p", sampling.top_p, 0, 1)
    _within("min_p", sampling.min_p, 0, 1)
    _within("repetition", sampling.repetition, _TINY, _HUGE)
    _within("presence", np.abs(sampling.presence), 0, _HUGE)
    _within("frequency", np.abs(sampling.frequency), 0, _HUGE)
    _within("top_k", sampling.top_k, 0, np.iinfo(np.int32).max)
    _within("target", sampling.target, -1, vocab - 1)
    _within("logprobs", sampling.logprobs, -1, vocab)
    if sampling.bias_values.size and not (sampling.bias_values < np.inf).all():
        raise ValueError("bias_values: must be numbers below infinity (-inf bans an id)")


def check_copies(pairs: I32, group: int, spec: KVSpec) -> None:
    """`pairs` [n, 2] are (source, destination) blocks of KV group `group`."""
    if not 0 <= group < len(spec.blocks):
        raise ValueError(f"copy_blocks: no KV group {group}; there are {len(spec.blocks)}")
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise ValueError(f"copy_blocks: pairs must be [n, 2], not {list(pairs.shape)}")
    check_ids("copy_blocks pairs", pairs, spec.blocks[group])


def check_parts(parts: list[Stored]) -> None:
    """`parts` can be stacked into one matrix."""
    if not parts:
        raise ValueError("weight: needs at least one part")
    for part in parts:
        if part.n_in != parts[0].n_in:
            raise ValueError(f"weight: parts of unequal width: {part.n_in} and {parts[0].n_in}")
        if part.data.ndim != 2 or part.data.shape[0] != part.n_out:
            raise ValueError(f"weight: data is {list(part.data.shape)}, wanted [{part.n_out}, bytes per row]")


def check_router(router: Router, experts: int) -> None:
    """`router` can choose among `experts` experts."""
    if router.scoring not in get_args(Scoring):
        raise ValueError(f"moe: unknown scoring {router.scoring!r}; there are {', '.join(get_args(Scoring))}")
    if router.group_score not in ("max", "top2"):
        raise ValueError(f'moe: unknown group_score {router.group_score!r}; there are "max" and "top2"')
    if not 1 <= router.groups <= experts or experts % router.groups or not 1 <= router.top_groups <= router.groups:
        raise ValueError(f"moe: {experts} experts do not make {router.top_groups} of {router.groups} groups")
    if router.groups > 1 and router.group_score == "top2" and experts < 2 * router.groups:
        raise ValueError(f"moe: {router.groups} groups of {experts} experts have no two largest scores each")
    if not 1 <= router.top_k <= experts // router.groups * (router.top_groups if router.groups > 1 else 1):
        raise ValueError(
            f"moe: top_k {router.top_k} of {experts} experts, of which {router.top_groups} of {router.groups} groups "
            "are looked at"
        )


def check_cache(spec: KVSpec) -> None:
    """`spec` describes a KV cache that can be made."""
    if spec.dtype not in KV_TYPES:
        raise ValueError(f"KV cache dtype {spec.dtype!r} is not supported; use one of {', '.join(KV_TYPES)}")
    if spec.block_size not in (16, 32, 64, 128):
        raise ValueError(f"KV cache block_size {spec.block_size} is not supported; use 16, 32, 64 or 128")
    if len(spec.group_of) != spec.layers:
        raise ValueError(f"KV cache group_of has {len(spec.group_of)} entries for {spec.layers} layers")
    if spec.layers and not 0 <= min(spec.group_of) <= max(spec.group_of) < len(spec.blocks):
        raise ValueError(f"KV cache group_of names a group outside 0..{len(spec.blocks) - 1}")
    if spec.latent and (spec.kv_heads != 1 or not 0 < spec.latent <= spec.head_dim):
        raise ValueError(
            f"KV cache of latent attention: {spec.kv_heads} KV heads and {spec.latent} of {spec.head_dim} elements are "
            f"values; there must be one head, and no more values than elements"
        )
    if spec.scales:
        _check_scales(spec)


def _check_scales(spec: KVSpec) -> None:
    if not spec.dtype.startswith("fp8"):
        raise ValueError(f"a KV cache of {spec.dtype} has no scales of layers")
    if len(spec.scales) != spec.layers:
        raise ValueError(f"KV cache: scales of {len(spec.scales)} layers for {spec.layers} layers")
    for layer, (k, v) in enumerate(spec.scales):
        if len(k) != spec.kv_heads or len(v) != (0 if spec.latent else spec.kv_heads):
            raise ValueError(
                f"KV cache: layer {layer} has {len(k)} scales of keys and {len(v)} of values for {spec.kv_heads} KV "
                "heads"
            )
        wrong = [scale for scale in (*k, *v) if not KV_LEAST_SCALE < scale < KV_LARGEST_SCALE]
        if wrong:
            raise ValueError(f"KV cache: a scale of layer {layer} is {wrong[0]}, which is no positive number")


def check_ids(name: str, ids: I32, end: int) -> None:
    """All of `ids` lie in [0, end)."""
    # A negative int32 seen as uint32 is larger than any end, so one pass finds both kinds of error.
    unsigned = ids.view(np.uint32)
    if ids.size and int(_most(unsigned, axis=None)) >= end:
        wrong = ids[(ids < 0) | (ids >= end)].ravel()[0]
        raise ValueError(f"{name}: {wrong} is not in [0, {end})")


def _written_blocks(batch: BatchArrays, lengths: I32, spec: KVSpec) -> None:
    if len(batch.tables) != len(spec.blocks):
        raise ValueError(f"tables: {len(batch.tables)} block tables for {len(spec.blocks)} KV groups")
    if not batch.tokens.size:
        return
    owner = batch.slots.astype(np.intp)
    if batch.tokens.size > owner.size:
        owner = np.repeat(owner, lengths)
    column = batch.positions // spec.block_size
    last_slot, last_column = int(_most(batch.slots)), int(_most(column))
    for group, (table, blocks) in enumerate(zip(batch.tables, spec.blocks, strict=True)):
        if table.dtype != np.int32 or table.ndim != 2:
            raise ValueError(f"tables[{group}]: must be int32 [slots, blocks], not {table.dtype} {list(table.shape)}")
        if last_slot >= table.shape[0] or last_column >= table.shape[1]:
            raise ValueError(
                f"tables[{group}]: {list(table.shape)} has no entry for slot {last_slot}, block {last_column}"
            )
        # One flat index: with two of them numpy makes several times the memory, in every step.
        index = owner * table.shape[1]
        index += column
        check_ids(f"tables[{group}]", table.reshape(-1).take(index), blocks)


def _consecutive(batch: BatchArrays) -> None:
    """Positions rise by one inside each sequence: attention finds a token's neighbours by it."""
    if batch.tokens.size == batch.slots.size:
        return
    broken = batch.positions[1:] - batch.positions[:-1] != 1
    broken.put(batch.starts[1:-1] - 1, False)  # from one sequence to the next
    if broken.any():
        raise ValueError("positions: tokens of a sequence must have consecutive positions")


def _vector(name: str, values: Values, dtype: np.dtype[Any]) -> Values:
    if values.dtype != dtype or values.ndim != 1 or not values.flags.c_contiguous:
        raise ValueError(f"{name}: must be a contiguous {dtype.name} vector, not {values.dtype} {values.shape}")
    return values


def _length(name: str, values: Values, wanted: int) -> None:
    if values.size != wanted:
        raise ValueError(f"{name}: {values.size} entries, wanted {wanted}")


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValueError(f"{name}: {count} in one step; the model was compiled for at most {limit}")


def _lengths(name: str, pointers: I32, end: int) -> I32:
    """Lengths of the pieces that `pointers` cut [0, end) into."""
    if pointers[0] != 0 or pointers[-1] != end:
        raise ValueError(f"{name}: must run from 0 to {end}, not from {pointers[0]} to {pointers[-1]}")
    lengths: I32 = pointers[1:] - pointers[:-1]
    return lengths


def _within(name: str, values: Values, low: float, high: float) -> None:
    # Written so that NaN fails too.
    if not (_least(values) >= low and _most(values) <= high):
        raise ValueError(f"{name}: values must lie in [{low:g}, {high:g}]; found {values.min()} to {values.max()}")
